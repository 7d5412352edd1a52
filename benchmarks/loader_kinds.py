"""The loaders that `loaders.py` compares, each used as its own documentation shows. One object is
one rank's loader.

A sample is a number and some bytes; a batch is a list of samples, so that no collation is measured
but each loader's own way from a shard to a sample. All shuffle; where a loader has a setting for
how far, it is `reach` samples.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import tarfile
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from data_loader import TrainSampler
from engine.comm.world import World
from engine.config import Config
from engine.plan import make_plan

SEED = 1

Sample = tuple[int, bytes]


class Data(NamedTuple):
    """Samples and how they are cut: `count` of `size` bytes, `per_shard` in a shard, the last of
    which has the rest."""

    folder: Path
    count: int
    size: int
    per_shard: int

    def shards(self) -> list[range]:
        return [
            range(at, min(at + self.per_shard, self.count))
            for at in range(0, self.count, self.per_shard)
        ]

    @property
    def tars(self) -> list[str]:
        return [
            str(self.folder / "tar" / f"{number:05}.tar") for number in range(len(self.shards()))
        ]

    def payload(self, number: int) -> bytes:
        """Return a sample's bytes: its number, again and again."""
        return number.to_bytes(8, "little") * (self.size // 8)


class Place(NamedTuple):
    """The process that reads, and the amount that it takes at once."""

    rank: int
    processes: int
    global_batch: int

    @property
    def batch(self) -> int:
        """Samples of a rank in a step, for a loader whose ranks have equal batches."""
        return self.global_batch // self.processes


class Kind:
    """What one loader needs and does, and its conditions.

    conditions  of a resumed run, as the loader's own documentation states them
    needs       the module that is imported
    """

    name: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    package: ClassVar[str] = ""
    conditions: ClassVar[str] = ""
    form: ClassVar[str] = "tar"  # the folder with the shards in this loader's format
    timed: ClassVar[bool] = True

    def __init__(self, data: Data, place: Place, reach: int):
        """Make a loader that begins with the epoch's first sample."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[list[Sample]]:
        raise NotImplementedError

    def state(self) -> Any:
        """Return what its documentation requires to be saved; None where it has no state."""
        raise NotImplementedError

    def load(self, state: Any) -> None:
        raise NotImplementedError

    @staticmethod
    def write(data: Data) -> None:
        """Make the shards in its format."""
        (data.folder / "tar").mkdir()
        for path, numbers in zip(data.tars, data.shards(), strict=True):
            with tarfile.open(path, "w") as tar:
                for number in numbers:
                    (about := tarfile.TarInfo(f"{number:08}.bin")).size = data.size
                    tar.addfile(about, io.BytesIO(data.payload(number)))

    @staticmethod
    def clean() -> None:
        """Remove what killed processes have left in the machine."""


class Lockstep(Kind):
    name, needs = "Lockstep", "formats.shards"
    conditions = (
        "the same seed and global batch, which the processes divide, or else virtual_workers"
    )
    lanes: ClassVar[int] = 0
    workers: ClassVar[int] = 0  # virtual ones

    def __init__(self, data: Data, place: Place, reach: int):
        shards = import_module("formats.shards")
        options = shards.Options(lanes=self.lanes)
        self.samples = shards.Shards(data.folder / "tar", self.sample, options=options)
        world = World(place.rank, place.rank, place.processes, torch.device("cpu"))
        share = place.global_batch // (self.workers or place.processes)
        cfg = Config(
            batch_size=share, global_batch=place.global_batch, virtual_workers=self.workers
        )
        self.sampler = TrainSampler(
            self.samples, make_plan(cfg, world, data.count), place.rank, SEED
        )
        self.epoch, self.consumed = -1, 0

    @staticmethod
    def sample(held: dict[str, Any]) -> Sample:
        return int(held["__key__"]), held["bin"]

    def __iter__(self) -> Iterator[list[Sample]]:
        self.epoch += 1
        self.sampler.set_epoch(self.epoch)
        self.sampler.position, self.consumed = self.consumed, 0
        batch: list[Sample] = []
        for micro in self.sampler:
            batch += [] if micro.empty else self.samples.__getitems__(micro.indices)
            if micro.closes_step:
                self.consumed = micro.consumed
                yield batch
                batch = []
        self.consumed = 0

    def state(self) -> Any:
        return self.epoch, self.consumed

    def load(self, state: Any) -> None:
        self.epoch, self.consumed = state[0] - 1, state[1]

    @staticmethod
    def write(data: Data) -> None:
        Kind.write(data)
        import_module("tools.lab.index_shards").main([str(data.folder / "tar"), "--processes", "1"])


class LockstepFewLanes(Lockstep):
    name, lanes = "Lockstep, 12 lanes", 12


class LockstepVirtual(Lockstep):
    # one process computes nothing else then
    name, workers, timed = "Lockstep, virtual_workers=4", 4, False


class WebDataset(Kind):
    name, needs, package = "webdataset", "webdataset", "webdataset==1.0.2"
    conditions = (
        "no state; a rank takes whole shards, and for several nodes resampling without an end "
        "is recommended"
    )

    def __init__(self, data: Data, place: Place, reach: int):
        wds = import_module("webdataset")
        # the order, of the shards
        shards = {"shardshuffle": len(data.tars), "detshuffle": True, "seed": SEED}
        samples = wds.WebDataset(data.tars, nodesplitter=wds.split_by_node, **shards).shuffle(
            reach, seed=SEED
        )
        samples = samples.map(lambda sample: (int(sample["__key__"]), sample["bin"]))
        self.loader = self.loading(samples, place.batch)

    @staticmethod
    def loading(samples: Any, batch: int) -> Any:
        return import_module("webdataset").WebLoader(
            samples, batch_size=batch, num_workers=0, collate_fn=list
        )

    def __iter__(self) -> Iterator[list[Sample]]:
        return iter(self.loader)

    def state(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        return None


class WebDatasetStateful(WebDataset):
    name, needs = (
        "webdataset in torchdata's StatefulDataLoader",
        "webdataset torchdata.stateful_dataloader",
    )
    package = "webdataset==1.0.2 torchdata==0.11.0"
    conditions = (
        "a dataset without a state is skipped through from its beginning; no state across ranks"
    )

    @staticmethod
    def loading(samples: Any, batch: int) -> Any:
        loader = import_module("torchdata.stateful_dataloader").StatefulDataLoader
        return loader(samples, batch_size=batch, num_workers=0, collate_fn=list)

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class TarByOffset:
    """A map-style dataset: any sample of any tar, by one `pread`. The offsets are read once, before
    the measurement."""

    offsets: ClassVar[dict[str, tuple[list[int], list[int]]]] = {}

    def __init__(self, data: Data):
        self.size = data.size
        if data.tars[0] not in self.offsets:
            for path in data.tars:
                with tarfile.open(path) as tar:
                    members = tar.getmembers()
                self.offsets[path] = (
                    [int(m.name[:8]) for m in members],
                    [m.offset_data for m in members],
                )
        self.tars, self.files = data.tars, {}
        self.ends = [*accumulate(len(self.offsets[path][0]) for path in data.tars)]

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Sample:
        shard = bisect_right(self.ends, index)
        numbers, offsets = self.offsets[path := self.tars[shard]]
        if path not in self.files:
            self.files[path] = os.open(path, os.O_RDONLY)
        return numbers[(at := index - self.ends[shard])], os.pread(
            self.files[path], self.size, offsets[at]
        )


class TorchData(Kind):
    name, needs, package = (
        "torchdata StatefulDataLoader",
        "torchdata.stateful_dataloader",
        "torchdata==0.11.0",
    )
    conditions = "state is gathered and given back across loader processes, but not across ranks"

    def __init__(self, data: Data, place: Place, reach: int):
        torchdata = import_module("torchdata.stateful_dataloader")
        sampler = import_module("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler
        samples = TarByOffset(data)
        mine = sampler(
            samples, num_replicas=place.processes, rank=place.rank, shuffle=True, seed=SEED
        )
        self.loader = torchdata.StatefulDataLoader(
            samples, place.batch, sampler=mine, collate_fn=list
        )

    def __iter__(self) -> Iterator[list[Sample]]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class Mosaic(Kind):
    name, needs, package, form = (
        "MosaicML streaming",
        "streaming",
        "mosaicml-streaming==0.13.0",
        "mds",
    )
    conditions = (
        "a constant global batch that the ranks divide evenly; canonical and physical nodes "
        "divide each other"
    )

    def __init__(self, data: Data, place: Place, reach: int):
        streaming = import_module("streaming")
        how = {
            "batch_size": place.batch,
            "shuffle": True,
            "shuffle_seed": SEED,
            "shuffle_block_size": reach,
        }
        samples = streaming.StreamingDataset(local=str(data.folder / "mds"), **how)
        self.loader = streaming.StreamingDataLoader(
            samples, batch_size=place.batch, collate_fn=self.batch
        )

    @staticmethod
    def batch(samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Columns, as in its own batches: it counts samples by the length of the first."""
        return {name: [sample[name] for sample in samples] for name in ("number", "bin")}

    def __iter__(self) -> Iterator[list[Sample]]:
        for batch in self.loader:
            yield [*zip(batch["number"], batch["bin"], strict=True)]

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    @staticmethod
    def write(data: Data) -> None:
        # bytes of a sample beside its own: a header, a place
        streaming, extra = import_module("streaming"), 64
        for number, numbers in enumerate(data.shards()):
            out = str(data.folder / "mds" / f"{number:05}")
            about = {
                "columns": {"number": "int", "bin": "bytes"},
                "size_limit": (data.size + extra) * len(numbers) * 2,
            }
            with streaming.MDSWriter(out=out, **about) as writer:
                for sample in numbers:
                    writer.write({"number": sample, "bin": data.payload(sample)})
        import_module("streaming.base.util").merge_index(str(data.folder / "mds"), keep_local=True)

    @staticmethod
    def clean() -> None:
        import_module("streaming.base.util").clean_stale_shared_memory()


class LitData(Kind):
    name, needs, package, form = "litdata", "litdata", "litdata==0.2.76", "lit"
    conditions = (
        "the same seed and shuffle; ranks in lockstep; a constant global batch for the same curve"
    )
    drop_last: ClassVar[bool | None] = None  # its default: True for several ranks
    fast: ClassVar[str] = "0"  # how chunks from a store are read, and not those of a local folder

    def __init__(self, data: Data, place: Place, reach: int):
        os.environ["LITDATA_POSIX_FAST"] = self.fast
        litdata = import_module("litdata")
        samples = litdata.StreamingDataset(
            str(data.folder / "lit"), shuffle=True, seed=SEED, drop_last=self.drop_last
        )
        self.loader = litdata.StreamingDataLoader(
            samples, batch_size=place.batch, num_workers=0, collate_fn=list
        )

    def __iter__(self) -> Iterator[list[Sample]]:
        for batch in self.loader:
            yield [(sample["number"], sample["bin"]) for sample in batch]

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    @staticmethod
    def write(data: Data) -> None:
        def samples(shard: int) -> Iterator[dict[str, Any]]:
            for number in data.shards()[shard]:
                yield {"number": number, "bin": data.payload(number)}

        with (
            open(os.devnull, "w") as nothing,
            contextlib.redirect_stdout(nothing),
            contextlib.redirect_stderr(nothing),
        ):
            import_module("litdata").optimize(
                fn=samples,
                inputs=[*range(len(data.shards()))],
                output_dir=str(data.folder / "lit"),
                chunk_size=data.per_shard,
                num_workers=1,
                start_method="fork",
            )


class LitDataAll(LitData):
    name, drop_last, timed = "litdata, drop_last=False", False, False
    conditions = LitData.conditions + "; it warns that a training may stop in a collective"


class LitDataLocal(LitData):
    name, fast = "litdata, a local folder", "1"
    conditions = LitData.conditions + "; of a local folder whole remaining chunks are resumed"


def installed(kind: type[Kind]) -> bool:
    return all(importlib.util.find_spec(name.partition(".")[0]) for name in kind.needs.split())


def ready(kind: type[Kind]) -> None:
    """Import a loader, and silence what its libraries print."""
    warnings.filterwarnings("ignore")
    os.environ.update(
        {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "LITDATA_DISABLE_VERSION_CHECK": "1",
        }
    )
    if kind is Mosaic:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "peer"))
        import_module("torchvision_shim").load()
    for name in kind.needs.split():
        import_module(name)


KINDS: list[type[Kind]] = [
    *(
        Lockstep,
        LockstepFewLanes,
        LockstepVirtual,
        WebDataset,
        WebDatasetStateful,
        TorchData,
        Mosaic,
        LitData,
        LitDataAll,
        LitDataLocal,
    )
]

INSTALL = (
    "python -m pip install --target SITE --no-deps webdataset==1.0.2 torchdata==0.11.0 "
    "mosaicml-streaming==0.13.0 "
    "litdata==0.2.76 braceexpand lightning-utilities boto3 botocore s3transfer jmespath "
    "python-dateutil six urllib3 "
    "obstore tifffile 'transformers<5' 'huggingface_hub<1' 'tokenizers<0.23' safetensors regex "
    "brotli python-snappy "
    "cramjam zstd catalogue requests xxhash filelock torchvision==0.28.0  # then "
    "PYTHONPATH=SITE; no other torch"
)
