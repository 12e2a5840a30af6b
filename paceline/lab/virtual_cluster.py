"""The cluster that a study simulates, as the study keeps it: its file's text, so that it is all there later."""

from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster import reading as cluster_file
from paceline.cluster.description import Cluster
from paceline.errors import UsageError


@dataclass(frozen=True)
class VirtualCluster:
    """Equal to another where what they describe is the same, whatever the files are called and say about it. Raises
    UsageError if the text describes no cluster."""

    source: str = field(compare=False)
    """A name that comes with Paceline, or the file's path: what `--cluster` takes."""
    text: str = field(compare=False)
    content: Cluster = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", cluster_file.parse(self.text, where=self.source))

    @classmethod
    def read(cls, name: str | Path) -> "VirtualCluster":
        """Read a TOML file, or a cluster that comes with Paceline, by its name. Raises UsageError if there is none, or
        it is wrong."""
        if not isinstance(name, str | Path):
            raise UsageError(f"a study takes a cluster's file or name, not {type(name).__name__}")
        path, text = cluster_file.read(name)
        return cls(str(name) if str(name) in cluster_file.shipped() else str(path.resolve()), text)

    @property
    def name(self) -> str:
        """The cluster's name in tables and figures, such as `lab-1gbe`."""
        return Path(self.source).stem

    def to_json(self) -> dict[str, str]:
        """What makes it again; the file itself need not be there."""
        return {"source": self.source, "text": self.text}
