"""The YAML that `paceline kubernetes` writes: a RayJob of KubeRay that can be read, changed and kept."""

import shlex
from collections.abc import Sequence
from typing import Any

from paceline.scheduler.ray_job import RESULTS, SCRIPTS, RayJob
from paceline.scheduler.yaml_text import documents

_KEY = "script.py"
_TOKEN_KEY = "auth_token"  # where KubeRay looks for it
_SUBMITTER = {"cpu": "1", "memory": "1Gi"}


def ray_job_yaml(job: RayJob, *, file: str) -> str:
    """The job in YAML, with what is to be done with it.

    Args:
        file: where it will be; `-` is the standard input.

    Raises:
        UsageError: the script or an argument is not Unicode.
    """
    objects = [_custom_resource(job)] if job.script is None else [_config_map(job), _custom_resource(job)]
    return f"""# A job for KubeRay 1.6 or newer. Its cluster's token is a Secret, which is made once:
#   {token_command(job)}
# Submit the job:
#   {apply_command(file)}
{documents(objects)}"""


def token_command(job: RayJob) -> str:
    """Makes the Secret. The token is no argument of a program, which other users of the machine could see."""
    where = f"{job.token_secret} --namespace {job.namespace} --from-file={_TOKEN_KEY}=/dev/stdin"
    return f'printf %s "$(openssl rand -hex 32)" | kubectl create secret generic {where}'


def apply_command(file: str) -> str:
    """The command that applies the file, on the server's side: kubectl's own way keeps a copy in an annotation, which
    is too small for scripts."""
    return f"kubectl apply --server-side -f {shlex.quote(file)}"


def _config_map(job: RayJob) -> dict[str, Any]:
    assert job.script is not None
    metadata = {"name": _config_map_name(job), "namespace": job.namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {_KEY: job.script[1]}}


def _config_map_name(job: RayJob) -> str:
    return f"{job.name}-script"


def _custom_resource(job: RayJob) -> dict[str, Any]:
    each: dict[str, str] = {"cpu": str(job.cores), "memory": job.memory}
    if job.gpus:
        each["nvidia.com/gpu"] = str(job.gpus)
    head = _container(job, "ray-head", {"cpu": str(job.head_cores), "memory": job.head_memory})
    head["ports"] = [{"name": "gcs-server", "containerPort": 6379}, {"name": "dashboard", "containerPort": 8265}]
    mounts, volumes = _storage(job)
    worker = _container(job, "ray-worker", each)
    submitter = _container(job, "ray-job-submitter", _SUBMITTER)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name, "namespace": job.namespace},
        "spec": {
            "submissionMode": "K8sJobMode",
            "entrypoint": entrypoint(job.command),
            "shutdownAfterJobFinishes": job.results_claim is not None,
            "submitterPodTemplate": _pod(job, submitter, restartPolicy="Never"),
            "rayClusterSpec": {
                "rayVersion": job.ray_version,
                "authOptions": {"mode": "token", "secretName": job.token_secret},
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},
                    "template": _pod(job, {**head, "volumeMounts": mounts}, volumes=volumes),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": job.nodes,
                        "minReplicas": job.bounds[0],
                        "maxReplicas": job.bounds[1],
                        "rayStartParams": {},
                        "template": _worker_pod(job, worker),
                    }
                ],
            },
        },
    }


def entrypoint(command: Sequence[str]) -> str:
    """A command for the shells of the operator's container and of Ray. Kubernetes makes one $ of two, and would put
    variables of the container in the place of some."""
    return shlex.join(command).replace("$", "$$")


def _container(job: RayJob, name: str, resources: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "image": job.image, "resources": {"requests": resources, "limits": resources}}


def _results(job: RayJob) -> tuple[dict[str, Any], dict[str, Any]]:
    """Mount and volume."""
    claim = job.results_claim
    where = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    return {"name": "results", "mountPath": RESULTS}, {"name": "results", **where}


def _storage(job: RayJob) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Mounts and volumes of the head."""
    mount, volume = _results(job)
    mounts, volumes = [mount], [volume]
    if job.script is not None:
        mounts.append({"name": "script", "mountPath": SCRIPTS, "readOnly": True})
        items = [{"key": _KEY, "path": job.script[0]}]
        volumes.append({"name": "script", "configMap": {"name": _config_map_name(job), "items": items}})
    return mounts, volumes


def _worker_pod(job: RayJob, container: dict[str, Any]) -> dict[str, Any]:
    if not job.shares_claim:
        return _pod(job, container)
    mount, volume = _results(job)
    return _pod(job, {**container, "volumeMounts": [mount]}, volumes=[volume])


def _pod(job: RayJob, container: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A pod with the account that was given. Without one it gets no key to Kubernetes, which it does not need."""
    account: dict[str, Any] = {"automountServiceAccountToken": False}
    if job.service_account is not None:
        account = {"serviceAccountName": job.service_account}
    pull = {"imagePullSecrets": [{"name": job.pull_secret}]} if job.pull_secret is not None else {}
    return {"spec": {**account, **pull, "containers": [container], **more}}
