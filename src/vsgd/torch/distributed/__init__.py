"""Other processes that train the same model. Only this package imports `torch.distributed`."""

from vsgd.torch.distributed.agreement import (
    check_averaged,
    checksum,
    contents_of,
    evaluate_on_all_ranks,
    facts_of,
    reduce_checks,
)
from vsgd.torch.distributed.hook import local_gradients
from vsgd.torch.distributed.messages import (
    ALONE,
    AVERAGED,
    DifferenceError,
    PeerError,
    Processes,
    Replicas,
    check_replicas,
    processes_of,
    raised_by_all,
)
from vsgd.torch.distributed.shards import (
    Shards,
    check_sharding,
    is_sharded,
    key_of,
    like,
    local_of,
    shards_of,
    summed,
)

__all__ = [
    "ALONE",
    "AVERAGED",
    "DifferenceError",
    "PeerError",
    "Processes",
    "Replicas",
    "Shards",
    "check_averaged",
    "check_replicas",
    "check_sharding",
    "checksum",
    "contents_of",
    "evaluate_on_all_ranks",
    "facts_of",
    "is_sharded",
    "key_of",
    "like",
    "local_gradients",
    "local_of",
    "processes_of",
    "raised_by_all",
    "reduce_checks",
    "shards_of",
    "summed",
]
