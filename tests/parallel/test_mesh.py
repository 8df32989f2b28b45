"""What a mesh has to do with the meshes that the process had before."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.parallel.mesh import lay_out


@pytest.fixture
def open_group():
    """Opens a process group of four ranks that are not there, after as many groups of other parts of a program."""

    def open_it(*, num_other_groups):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        for _ in range(num_other_groups):
            dist.new_group([0, 1])

    yield open_it
    dist.destroy_process_group()


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_a_tensor_on_a_second_mesh_stays_on_it(open_group, axes):
    for num_other_groups in (0, 3):
        open_group(num_other_groups=num_other_groups)
        mesh = lay_out(axes, device_type="cpu").layers["shard", "tensor"]
        tensor = distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        for made in (tensor.detach(), tensor + 1, tensor.t()):
            assert made.device_mesh.get_all_groups() == mesh.get_all_groups()
