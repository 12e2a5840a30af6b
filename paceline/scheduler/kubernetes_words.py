"""Names and quantities as Kubernetes takes them, refused here with the reason."""

import re

from paceline.errors import UsageError

_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_UNITS = ("", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_LONGEST_JOB = 47
"""KubeRay puts a suffix behind a job's name for its cluster's, and one behind that for services and pods."""


def job_name(text: str, *, option: str) -> str:
    """A RayJob's name: a label of DNS (RFC 1035). Raises UsageError for what is none."""
    if re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", text) is None:
        raise UsageError(
            f"{option}: {text!r} is no name for a job of Kubernetes, which is of a-z, 0-9 and -, begins with a letter "
            f"and ends with a letter or a digit (DNS-1035){_such_as(text)}"
        )
    if len(text) > _LONGEST_JOB:
        raise UsageError(f"{option}: {text!r} has {len(text)} characters; KubeRay takes jobs' names of {_LONGEST_JOB}")
    return text


def namespace(text: str, *, option: str) -> str:
    """A namespace: a label of DNS, which may begin with a digit (RFC 1123). Raises UsageError for what is none."""
    if re.fullmatch(_LABEL, text) is None or len(text) > 63:
        raise UsageError(
            f"{option}: {text!r} is no namespace, which is of at most 63 of a-z, 0-9 and -, with no - at its ends"
        )
    return text


def object_name(text: str, *, option: str) -> str:
    """The name of a Secret, a claim or an account: labels and dots (RFC 1123). Raises UsageError for what is none."""
    if re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", text) is None or len(text) > 253:
        raise UsageError(
            f"{option}: {text!r} is no name in Kubernetes, which is of at most 253 of a-z, 0-9, - and ., where each "
            "part between dots begins and ends with a letter or a digit"
        )
    return text


def memory(text: str, *, option: str) -> str:
    """The bytes that a text such as 8Gi or 500M says. Raises UsageError for what says none."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([a-zA-Z]*)", text)
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise UsageError(f"{option}: {text!r} is no memory, which is as in 8Gi (2**30 bytes each) or 500M (10**6)")
    return text


def image(text: str, *, option: str) -> str:
    """An image's address. Raises UsageError for what has spaces, or is nothing."""
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise UsageError(f"{option}: {text!r} is no image, which is as in registry.example/team/train:1")
    return text


def ray_version(text: str, *, option: str) -> str:
    """The image's Ray. Raises UsageError for what is no version, or one without tokens."""
    match = re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})\.[0-9]{1,4}", text)
    if match is None or (int(match[1]), int(match[2])) < (2, 52):
        raise UsageError(f"{option}: {text!r} is no version of Ray from 2.52.0 on, the first that has tokens")
    return text


def _such_as(text: str) -> str:
    """A name that is near."""
    near = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-0123456789")[:_LONGEST_JOB].rstrip("-")
    return f", such as {near}" if near else ""
