"""`batch_norm_act`'s tests again, on a device."""

import torch

import fusedlayers as fl
from tests.ops.test_batch_norm_act import *  # noqa: F403


def test_a_graph_counts_each_replay():
    bn = fl.FusedBatchNormAct2d(72).cuda()
    x = torch.randn(8, 72, 28, 28, device="cuda").to(memory_format=torch.channels_last)
    with fl.settings(route="triton"):
        bn(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bn(x)
    for _ in range(5):
        graph.replay()
    assert bn.num_batches_tracked == 6
