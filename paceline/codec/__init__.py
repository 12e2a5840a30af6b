"""Forms of tensors on their way. `CODECS` has them by the names of the command line."""

from collections.abc import Mapping
from typing import Any

from paceline.codec.base import Codec, Form, JointCodec, Payload, Shape, TensorCodec, as_bytes, num_bytes
from paceline.codec.blocks import Blocks
from paceline.codec.cosines import DCT
from paceline.codec.halves import Half
from paceline.codec.low_rank import PowerSGD
from paceline.codec.memory import Encoded, ErrorFeedback, Forgetful, Memory, SharedEstimate, memory_of
from paceline.codec.quantised import QSGD, TernGrad
from paceline.codec.signs import OneBit, Sign
from paceline.codec.sparse import RandomK, TopK

CODECS: Mapping[str, tuple[type[Codec], Mapping[str, Any]]] = {
    "fp16": (Half, {"form": "fp16"}),
    "bf16": (Half, {"form": "bf16"}),
    "int8": (Blocks, {"form": "int8"}),
    "fp8": (Blocks, {"form": "fp8"}),
    "qsgd": (QSGD, {}),
    "terngrad": (TernGrad, {}),
    "one-bit": (OneBit, {}),
    "sign": (Sign, {}),
    "top-k": (TopK, {}),
    "random-k": (RandomK, {}),
    "powersgd": (PowerSGD, {}),
    "dct": (DCT, {}),
}
"""By name: the class, and the options that the name fixes."""

__all__ = [
    "CODECS",
    "DCT",
    "QSGD",
    "Blocks",
    "Codec",
    "Encoded",
    "ErrorFeedback",
    "Forgetful",
    "Form",
    "Half",
    "JointCodec",
    "Memory",
    "OneBit",
    "Payload",
    "PowerSGD",
    "RandomK",
    "Shape",
    "SharedEstimate",
    "Sign",
    "TensorCodec",
    "TernGrad",
    "TopK",
    "as_bytes",
    "memory_of",
    "num_bytes",
]
