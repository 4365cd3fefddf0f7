"""A part of torch's own suite for c10d backends, over libddp's; docs/c10d.md has the whole."""

import importlib.util

import pytest
import torch_suite

#: Every family once or twice: what is left out differs in dtype or group.
TESTS = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_group_max",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_group_min",
    "test_all_reduce_sum_async",
    "test_all_to_all_complex",
    "test_all_to_all_group",
    "test_all_to_all_single_equal_split_full_group",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_timeout_full_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_ddp_create_graph",
    "test_destroy_group",
    "test_gather_checks",
    "test_gather_group",
    "test_gather_object_subgroup",
    "test_get_backend",
    "test_get_future",
    "test_get_rank_size_group",
    "test_isend_autograd_profiler",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
    "test_new_subgroups_with_group_param",
    "test_reduce_full_group_product",
    "test_reduce_sum_twice",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.fixture(scope="session", autouse=True)
def namespaces():
    """In place of the one in conftest.py: nothing here needs several hosts."""


@pytest.fixture(scope="module")
def results():
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("expecttest is not installed, and torch's tests import it")
    found, output = torch_suite.run_at_both_sizes("libddp", TESTS, deadline=300)
    missing = [name for name in TESTS if name not in found]
    assert not missing, f"{missing} did not run:\n{output[-3000:]}"
    return found


@pytest.mark.parametrize("name", TESTS)
def test_passes(results, name):
    assert results[name]["outcome"] == "passed", results[name]["reason"]
