"""Which weights a worker has loaded: KV of others with the same shape would be read without an error."""

import logging
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger(__name__)

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(model_path: Path) -> str:
    """A hash of the weights' file names, sizes and of samples of each file; empty if the folder has none, or
    they cannot be read."""
    files = sorted(model_path.glob("*.safetensors"))
    digest = blake2b(digest_size=8)
    try:
        for path in files:
            size_bytes = path.stat().st_size
            digest.update(f"{path.name} {size_bytes}\n".encode())
            with path.open("rb") as file:
                for i in range(_NUM_SAMPLES):
                    file.seek(size_bytes * i // _NUM_SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        log.warning("checkpoint unknown reason=%s", error)
        return ""
    return digest.hexdigest() if files else ""
