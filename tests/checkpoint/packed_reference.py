"""The packed layouts and the checksum, written plainly in NumPy from docs/format.md.

Tests compare the native packer with this; it is the second opinion on the format.
"""

import numpy as np

FLOATS = {"bf16": np.dtype("<u2"), "f16": np.dtype("<f2"), "f32": np.dtype("<f4")}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def packed_bytes(format: str, rows: int, cols: int, group: int) -> int:
    blocks = -(-rows // 16)
    if format in FLOATS:
        return blocks * cols * 16 * FLOATS[format].itemsize
    groups = -(-cols // group)
    code = {"q8": group * 16, "q4": group * 8, "mxfp4": group * 8}[format]
    return blocks * groups * (code + (16 if format == "mxfp4" else 32))


def _widen(w: np.ndarray) -> np.ndarray:
    if w.dtype == np.uint16:
        return (w.astype(np.uint32) << 16).view(np.float32)
    return w.astype(np.float32)


def _narrow(w: np.ndarray, format: str) -> np.ndarray:
    if format != "bf16":
        return w.astype(FLOATS[format])
    bits = w.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def quantise(w: np.ndarray, format: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    """w [N, K] float32, padded -> codes [N, G, g] int, scales [N, G] (f16, or uint8 exponents)."""
    x = w.reshape(len(w), -1, group)
    if format == "mxfp4":
        amax = np.abs(x).max(-1)
        with np.errstate(divide="ignore"):
            exponent = np.where(amax > 0, np.floor(np.log2(amax)) - 2, -127).clip(-127, 127)
        scaled = x / np.exp2(exponent)[..., None].astype(np.float32)
        magnitude = np.abs(scaled)
        # Nearest, ties to the even code: the codes' order is the values' order.
        codes = np.zeros(x.shape, np.int64)
        for code in range(7):
            middle = (E2M1[code] + E2M1[code + 1]) / 2
            up = magnitude > middle if code % 2 == 0 else magnitude >= middle
            codes[up] = code + 1
        signs = (np.signbit(x) & (codes > 0)).astype(np.int64) << 3  # zero has no sign
        return codes | signs, (exponent + 127).astype(np.uint8)
    if format == "q8":
        scale = (np.abs(x).max(-1) / np.float32(127)).astype(np.float16)
        low, high = -127, 127
    else:
        at = np.abs(x).argmax(-1)
        extreme = np.take_along_axis(x, at[..., None], -1)[..., 0]
        scale = (extreme / np.float32(-8)).astype(np.float16)
        low, high = -8, 7
    wide = scale.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(wide == 0, 0, np.rint(x / wide)).clip(low, high)
    return codes.astype(np.int64), scale


def pack(w: np.ndarray, format: str, group: int) -> np.ndarray:
    rows, cols = w.shape
    blocks = -(-rows // 16)
    if format in FLOATS:
        values = np.zeros((blocks * 16, cols), FLOATS[format])
        values[:rows] = w if w.dtype == FLOATS[format] else _narrow(_widen(w), format)
        out = values.reshape(blocks, 16, cols).transpose(0, 2, 1)
        return np.ascontiguousarray(out).view(np.uint8).reshape(-1)
    padded = np.zeros((blocks * 16, -(-cols // group) * group), np.float32)
    padded[:rows, :cols] = _widen(w)
    codes, scales = quantise(padded, format, group)
    groups = codes.shape[1]
    # [block, 16 outputs, groups, g/4, 4] -> [block, groups, g/4, 16 outputs, 4]
    lanes = codes.reshape(blocks, 16, groups, group // 4, 4).transpose(0, 2, 3, 1, 4)
    lanes = lanes.reshape(blocks, groups, group // 4, 64)
    if format == "q8":
        code_bytes = lanes.astype(np.int8).view(np.uint8).reshape(blocks, groups, -1)
    else:
        nibbles = (lanes + 8 if format == "q4" else lanes).astype(np.uint8)
        code_bytes = nibbles[:, :, 0::2] | (nibbles[:, :, 1::2] << 4)
        code_bytes = code_bytes.reshape(blocks, groups, -1)
    scale_bytes = np.ascontiguousarray(scales.reshape(blocks, 16, groups).transpose(0, 2, 1))
    scale_bytes = scale_bytes.view(np.uint8).reshape(blocks, groups, -1)
    return np.concatenate([code_bytes, scale_bytes], axis=-1).reshape(-1)


def unpack_bytes(data: np.ndarray, format: str, rows: int, cols: int, group: int) -> np.ndarray:
    """The real values [N, K] float32 of packed bytes."""
    blocks = -(-rows // 16)
    if format in FLOATS:
        values = data.view(FLOATS[format]).reshape(blocks, cols, 16).transpose(0, 2, 1)
        return _widen(np.ascontiguousarray(values.reshape(-1, cols)[:rows]))
    groups = -(-cols // group)
    parts = data.reshape(blocks, groups, -1)
    if format == "q8":
        codes = parts[:, :, : group * 16].copy().view(np.int8).astype(np.float32)
    else:
        low_high = parts[:, :, : group * 8].reshape(blocks, groups, -1, 1, 64)
        nibbles = np.concatenate([low_high & 15, low_high >> 4], axis=3).astype(np.int64)
        if format == "q4":
            codes = (nibbles - 8).astype(np.float32)
        else:
            codes = np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])
    code_bytes = group * 16 if format == "q8" else group * 8
    raw = np.ascontiguousarray(parts[:, :, code_bytes:])
    if format == "mxfp4":
        scales = np.exp2(raw.astype(np.float32) - 127)
    else:
        scales = raw.view(np.float16).astype(np.float32)
    codes = codes.reshape(blocks, groups, group // 4, 16, 4).transpose(0, 3, 1, 2, 4)
    codes = codes.reshape(blocks, 16, groups, group)
    values = codes * scales.transpose(0, 2, 1)[..., None]
    return values.reshape(blocks * 16, -1)[:rows, :cols].astype(np.float32)


def checksum(data: np.ndarray) -> int:
    """hr64, in Python's unbounded integers."""
    prime, mask = 0x9FB21C651E98DF25, (1 << 64) - 1
    lanes = [(i + 1) * 0x9E3779B97F4A7C15 & mask for i in range(8)]
    padded = data.tobytes() + bytes(-len(data) % 64)
    for at in range(0, len(padded), 64):
        for i in range(8):
            word = int.from_bytes(padded[at + 8 * i : at + 8 * i + 8], "little")
            product = (lanes[i] ^ word) * prime & mask
            lanes[i] = (product << 29 | product >> 35) & mask
    value = len(data)
    for lane in lanes:
        value = (value ^ lane) * prime & mask
        value ^= value >> 32
    return value
