"""The job of KubeRay that `paceline kubernetes` writes, read as the operator and its shells read it."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.scheduler import RayJob, ray_job_yaml
from paceline.scheduler.ray_job_yaml import entrypoint
from paceline.scheduler.yaml_text import documents

SCHEMA = json.loads((Path(__file__).parent / "ray_job_schema.json").read_text(encoding="utf-8"))
PUBLISHED = os.environ.get("PACELINE_KUBERAY_CRD")
SCRIPT = "import paceline\n\nworker = paceline.init()\n"
FULL: dict[str, Any] = {
    "service_account": "trainer",
    "pull_secret": "registry.key",
    "results_claim": "results",
    "gpus": 2,
}
# No surrogates, which are not Unicode, and no zero, which no argument has.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?", fullmatch=True)
MEMORIES = st.from_regex(r"[1-9][0-9]{0,5}(\.[0-9]{1,3})?(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?", fullmatch=True)


def job(**changed: Any) -> RayJob:
    given: dict[str, Any] = {
        "name": "train",
        "namespace": "default",
        "image": "team/train:1",
        "nodes": 4,
        "bounds": (4, 4),
        "cores": 8,
        "memory": "16Gi",
        "gpus": 0,
        "head_cores": 1,
        "head_memory": "4Gi",
        "ray_version": "2.60.0",
        "command": ["paceline", "run", "/paceline/script/train.py", "--workers", "4"],
        "script": ("train.py", SCRIPT),
        "token_secret": "ray-token",
    }
    return RayJob(**{**given, **changed})


def read(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def resource(**changed: Any) -> Any:
    return read(ray_job_yaml(job(**changed), file="job.yaml"))[-1]


def as_kubernetes_gives_it(text: str) -> str:
    """What a container's argument is, where no variable's name is found: `$$` stands for `$`."""
    return text.replace("$$", "$")


@pytest.mark.parametrize("changed", [{}, FULL, {"script": None}], ids=["plain", "full", "in image"])
def test_every_object_has_the_fields_that_there_are(changed: dict[str, Any]) -> None:
    for each in read(ray_job_yaml(job(**changed), file="-")):
        jsonschema.validate(each, SCHEMA)


def places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where an object has objects."""
    if isinstance(found, dict):
        yield path
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


OPEN = {"data", "rayStartParams"}
"""Whose keys are free."""


@pytest.mark.parametrize("path", [p for p in places(resource(**FULL)) if not (p and p[-1] in OPEN)], ids=str)
def test_a_field_that_there_is_not_is_refused(path: tuple[Any, ...]) -> None:
    changed = copy.deepcopy(resource(**FULL))
    inside = changed
    for key in path:
        inside = inside[key]
    inside["replica"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, SCHEMA)


def strict(schema: Any) -> Any:
    """The same schema, which takes no fields but its own."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.skipif(
    PUBLISHED is None, reason="PACELINE_KUBERAY_CRD is not set: the path of KubeRay's ray.io_rayjobs.yaml"
)
def test_the_operators_own_schema_takes_the_job() -> None:
    versions = yaml.safe_load(Path(str(PUBLISHED)).read_text(encoding="utf-8"))["spec"]["versions"]
    whole = next(version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1")
    validator = jsonschema.Draft202012Validator(strict(whole))
    for changed in ({}, FULL, {"script": None}):
        validator.validate(resource(**changed))
    broken = resource(**FULL)
    broken["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 3
    assert not validator.is_valid(broken)
    broken = resource(**FULL)
    broken["spec"]["rayClusterSpec"]["authOptions"]["mode"] = "none"
    assert not validator.is_valid(broken)


def test_hosts_get_what_was_asked_and_the_head_trains_nothing() -> None:
    cluster = resource(**FULL)["spec"]["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]
    assert [workers[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [4, 4, 4]
    asked = {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": "2"}
    assert workers["template"]["spec"]["containers"][0]["resources"] == {"requests": asked, "limits": asked}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}


def pods(spec: Any) -> list[Any]:
    cluster = spec["rayClusterSpec"]
    templates = [spec["submitterPodTemplate"], cluster["headGroupSpec"]["template"]]
    return [template["spec"] for template in (*templates, cluster["workerGroupSpecs"][0]["template"])]


def test_account_and_pull_secret_are_every_pods() -> None:
    for pod in pods(resource(**FULL)["spec"]):
        assert pod["serviceAccountName"] == "trainer"
        assert pod["imagePullSecrets"] == [{"name": "registry.key"}]
        assert "automountServiceAccountToken" not in pod
    for pod in pods(resource()["spec"]):
        assert pod["automountServiceAccountToken"] is False
        assert not {"serviceAccountName", "imagePullSecrets"} & set(pod)


@pytest.mark.parametrize(("claim", "ends"), [(None, False), ("results", True)])
def test_a_cluster_ends_with_its_run_where_results_are_kept(claim: str | None, ends: bool) -> None:
    spec = resource(results_claim=claim)["spec"]
    assert spec["shutdownAfterJobFinishes"] is ends
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    volume = next(volume for volume in head["volumes"] if volume["name"] == "results")
    assert volume["persistentVolumeClaim" if ends else "emptyDir"] == ({"claimName": "results"} if ends else {})
    assert {"name": "results", "mountPath": "/paceline/results"} in head["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("shares", [False, True])
def test_a_claim_is_on_the_hosts_that_train_where_that_is_asked(shares: bool) -> None:
    cluster = resource(results_claim="results", shares_claim=shares)["spec"]["rayClusterSpec"]
    pod = cluster["workerGroupSpecs"][0]["template"]["spec"]
    assert pod.get("volumes") == (
        [{"name": "results", "persistentVolumeClaim": {"claimName": "results"}}] if shares else None
    )
    mounts = [{"name": "results", "mountPath": "/paceline/results"}]
    assert pod["containers"][0].get("volumeMounts") == (mounts if shares else None)


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=6), NAMES, MEMORIES, TEXTS)
def test_names_quantities_scripts_and_arguments_come_through(
    arguments: list[str], name: str, memory: str, script: str
) -> None:
    command = ["paceline", "run", "train.py", "--", *arguments]
    text = ray_job_yaml(job(name=name, memory=memory, command=command, script=("train.py", script)), file="-")
    config, made = read(text)
    assert config["data"] == {"script.py": script}
    assert made["metadata"]["name"] == name
    worker = made["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"]["memory"] == memory
    first = shlex.split(as_kubernetes_gives_it(made["spec"]["entrypoint"]))
    assert (
        shlex.split(shlex.join(first)) == command
    )  # Ray joins what the submitter's shell gives it, for a second shell


ODD = [
    "$(HOME)",
    "$$",
    "$HOME",
    "a b",
    "it's",
    '"',
    "\\",
    "`id`",
    "new\nline",
    "*",
    "",
    "--",
    "-x",
    "1e3",
    "ä",
    "!",
    "#",
]


def test_two_shells_give_the_arguments_as_they_were() -> None:
    shown = as_kubernetes_gives_it(entrypoint(["printf", r"%s\0", *ODD]))
    once = subprocess.run(["bash", "-c", "--", shown], capture_output=True, text=True, check=True).stdout
    assert once.split("\0")[:-1] == ODD
    again = shlex.join(["printf", r"%s\0", *once.split("\0")[:-1]])
    assert subprocess.run(["sh", "-c", again], capture_output=True, text=True, check=True).stdout == once


def test_nothing_that_is_text_can_be_read_as_a_number_or_a_truth() -> None:
    """YAML 1.1 and 1.2 differ in what they take for one; quoted, or begun with a letter, it is none."""
    words = [
        "y",
        "n",
        "yes",
        "off",
        "null",
        "1e3",
        "0o17",
        "1_000",
        "1:30",
        "12",
        ".5",
        "~",
        "=",
        "2024-01-01",
        "e3",
        "",
    ]
    text = documents([{"words": words}])
    assert yaml.safe_load(text) == {"words": words}
    plain = [token.value for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken) and token.plain]
    assert [word for word in plain if not re.match(r"[a-zA-Z].", word)] == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubernetes_own_reader_reads_the_same() -> None:
    text = ray_job_yaml(
        job(name="y", memory="1000", command=["paceline", "run", *ODD], **{**FULL, "gpus": 1}), file="-"
    )
    command = ["kubectl", "label", "--local", "--dry-run=client", "-f", "-", "paceline=test", "-o", "json"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=600, check=True)
    decoder, rest, found = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        each, end = decoder.raw_decode(rest)
        del each["metadata"]["labels"]
        found.append(each)
        rest = rest[end:].strip()
    assert found == read(text)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "My_Job"}, r"--name: 'My_Job' is no name .* begins with a letter .*DNS-1035\), such as my-job"),
        ({"name": "1st"}, "DNS-1035"),
        ({"name": "a-"}, "DNS-1035"),
        ({"name": "a\n"}, "DNS-1035"),
        ({"name": "a" * 48}, "48 characters; KubeRay takes jobs' names of 47"),
        ({"namespace": "team.a"}, "--namespace: 'team.a' is no namespace"),
        ({"memory": "16GB"}, "--memory: '16GB' is no memory, which is as in 8Gi"),
        ({"memory": "500m"}, "is no memory"),
        ({"memory": "0Gi"}, "is no memory"),
        ({"memory": "-1Gi"}, "is no memory"),
        ({"head_memory": "lots"}, "--head-memory: 'lots'"),
        ({"image": "a b"}, "--image: 'a b' is no image"),
        ({"image": ""}, "is no image"),
        ({"ray_version": "2.51.0"}, "from 2.52.0 on, the first that has tokens"),
        ({"ray_version": "nightly"}, "from 2.52.0 on"),
        ({"token_secret": "Token"}, "--token-secret: 'Token' is no name in Kubernetes"),
        ({"results_claim": ""}, "--results-claim: '' is no name"),
        ({"results_claim": None, "shares_claim": True}, "--shared-claim has no effect without --results-claim"),
        ({"service_account": "a..b"}, "--service-account: 'a..b' is no name"),
        ({"pull_secret": "a" * 254}, "--pull-secret"),
        ({"script": ("train.py", "x" * (2**20 + 1))}, r"1,048,577 bytes.*1,048,576 \(1 MiB\).*--script-in-image"),
        ({"script": ("..py", "")}, "let it not begin with"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_in_words(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        job(**changed)


def test_arguments_that_are_not_unicode_are_refused() -> None:
    with pytest.raises(UsageError, match="is not Unicode"):
        ray_job_yaml(job(command=["paceline", "run", "a\udcff"]), file="-")


def test_the_largest_script_and_name_are_taken() -> None:
    jsonschema.validate(resource(name="a" * 47, script=("train.py", "x" * 2**20)), SCHEMA)


def test_the_comment_says_how_to_make_the_secret_and_to_submit() -> None:
    text = ray_job_yaml(job(namespace="team", token_secret="mine"), file="my job.yaml")
    said = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    assert "kubectl apply --server-side -f 'my job.yaml'" in said
    made = next(line for line in said if "kubectl create secret" in line)
    assert made.endswith("kubectl create secret generic mine --namespace team --from-file=auth_token=/dev/stdin")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_line_that_makes_the_secret_makes_one_with_a_token() -> None:
    text = ray_job_yaml(job(), file="-")
    line = next(line for line in text.splitlines() if "create secret" in line).removeprefix("#").strip()
    done = subprocess.run(
        ["bash", "-c", f"{line} --dry-run=client -o jsonpath='{{.data.auth_token}}' | base64 -d"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert re.fullmatch("[0-9a-f]{64}", done.stdout)
