"""Safetensors files read and written by hand, so that tests need no library for them."""

import json
from pathlib import Path

import numpy as np

from headrace.checkpoint.safetensors import read_header

DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "U8": "u1", "I32": "<i4", "I64": "<i8"}
NAMES = {np.dtype(v): k for k, v in DTYPES.items()}
Tensors = dict[str, np.ndarray]


def read_tensors(path: Path) -> Tensors:
    """Every tensor of a file; bf16 as its bits."""
    data = path.read_bytes()
    return {
        name: np.frombuffer(data[e.offset : e.offset + e.nbytes], DTYPES[e.dtype]).reshape(e.shape)
        for name, e in read_header(path).tensors.items()
    }


def write_safetensors(path: Path, tensors: Tensors, dtypes: dict[str, str] | None = None) -> None:
    """Write a file in the order given; `dtypes` names those that NumPy has no type for."""
    header, at = {}, 0
    for name, array in tensors.items():
        dtype = (dtypes or {}).get(name) or NAMES[array.dtype]
        span = [at, at + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": span}
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(a.tobytes() for a in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
