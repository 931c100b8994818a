"""Whose code a file is, by its path alone: also of another process, another host, or another Python than ours."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from pathlib import PurePosixPath

USER, PACKAGE, LIBRARY = 2, 1, 0
_TORCH = re.compile(r"(?:^|-packages/|/)torch/(?=[\w/]+\.py$)")
# also of a torch that was built in its sources
_OF_TORCH = ("distributed/", "nn/modules/", "nn/parallel/", "utils/data/", "autograd/", "optim/", "_")
_RECORDER = re.compile(r"(?:^|/)distdiag/(?:(?:recorder|page)/[\w/]+|run|everywhere)\.py$")
# Python's own, generated and native code, the recorder around it, and what starts the ranks
_LIBRARY = re.compile(
    r"^<|/lib(?:64)?/python3[\d.]*/(?!(?:site|dist)-packages/)|^torch/|^(?:asyncio|concurrent|ctypes|http|importlib|multiprocessing|urllib|xmlrpc)/|-packages/torch/|\.(?:cpp|cc|h|hpp|pyx|so)$"
    rf"|{_RECORDER.pattern}|(?:^|/)bin/(?:torchrun|accelerate|deepspeed|ray|vllm|lightning|fabric|tune)$"
)

# py-spy and the profiler leave out the folder of installed packages: `tqdm/_monitor.py`
_SHORT_PACKAGE = re.compile(
    r"^(?:accelerate|aiohttp|apex|azure|boto3|botocore|composer|cv2|dask|datasets|decord|deepspeed|diffusers|fairscale|filelock|flash_attn|fsspec|gcsfs|"
    r"google|grpc|h5py|httpcore|httpx|huggingface_hub|ignite|joblib|keras|lightning|lightning_fabric|litdata|lmdb|mlflow|mpi4py|numpy|pandas|PIL|peft|"
    r"psycopg2?|pyarrow|pymongo|pytorch_lightning|ray|redis|requests|s3fs|s3transfer|safetensors|scipy|sentry_sdk|sklearn|sqlalchemy|"
    r"tensorboardX?|timm|tokenizers|torchaudio|torchdata|torchmetrics|torchvision|tqdm|transformers|triton|trl|urllib3|wandb|webdataset|zarr|zmq)/"
)


def in_torch(file: str) -> str:
    """Return the path of a file below torch's package; empty if it is not torch's."""
    found = _TORCH.search(file)
    return file[found.end() :] if found else ""


def in_recorder(file: str) -> bool:
    """True for a file of distdiag's that runs in a recorded rank."""
    return _RECORDER.search(file) is not None


@lru_cache(4096)
def users(file: str) -> bool:
    """True if a file is neither Python's nor torch's nor an installed package's, as tools show it from outside: often by a short path."""
    return owner(file) == USER and _SHORT_PACKAGE.match(file) is None


@lru_cache(4096)
def owner(file: str) -> int:
    """Return USER, PACKAGE (an installed one) or LIBRARY (Python's, torch's, ours) for a frame's file."""
    if "/" not in file and PurePosixPath(file).stem in sys.stdlib_module_names:
        return LIBRARY  # a short name, as `py-spy dump` prints it
    if _LIBRARY.search(file) or in_torch(file).startswith(_OF_TORCH):
        return LIBRARY
    return PACKAGE if "-packages/" in file else USER
