"""Forms of tensors on their way, by the names of the command line: `codec=top-k`, `codec.ratio=0.01`."""

from paceline.codec.automatic import Auto, Chosen, chosen
from paceline.codec.base import Codec, Form, JointCodec, Payload, Shape, TensorCodec, as_bytes, num_bytes
from paceline.codec.blocks import FP8, Int8
from paceline.codec.cosines import DCT
from paceline.codec.halves import BF16, FP16
from paceline.codec.low_rank import PowerSGD
from paceline.codec.memory import Encoded, ErrorFeedback, Forgetful, Memory, SharedEstimate, memory_of, owed
from paceline.codec.quantised import QSGD, TernGrad
from paceline.codec.signs import OneBit, Sign
from paceline.codec.sparse import RandomK, TopK

__all__ = [
    "BF16",
    "DCT",
    "FP8",
    "FP16",
    "QSGD",
    "Auto",
    "Chosen",
    "Codec",
    "Encoded",
    "ErrorFeedback",
    "Forgetful",
    "Form",
    "Int8",
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
    "chosen",
    "memory_of",
    "num_bytes",
    "owed",
]
