"""Restores a checkpoint of jaxthd with orbax and jax alone, whole or in parts, on any number of devices.

python docs/examples/orbax_only.py runs/my/checkpoints                  all arrays of the newest step
python docs/examples/orbax_only.py runs/my/checkpoints params/encoder   those of the encoder
"""

import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def restore(checkpoints: Path, *parts: str) -> dict[str, jax.Array]:
    """The arrays of the newest step, by name; of these parts alone, if any are given.

    Each is sharded over all devices here along its first dim that they divide, or else replicated.
    """
    step = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    folder = checkpoints.absolute() / str(step) / "state"
    mesh = Mesh(jax.devices(), ("devices",))

    def wanted(path, saved):
        if parts and not any(f"{name(path)}/".startswith(f"{part}/") for part in parts):
            return ocp.PLACEHOLDER  # it is not read
        dims = ["devices" if size % mesh.size == 0 else None for size in saved.shape]
        spec = PartitionSpec(*dims[: dims.index("devices") + 1]) if "devices" in dims else PartitionSpec()
        return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=NamedSharding(mesh, spec))

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree
        tree = jax.tree_util.tree_map_with_path(wanted, saved, is_leaf=lambda x: hasattr(x, "shape"))
        how = ocp.checkpoint_utils.construct_restore_args(tree)
        found = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(tree, restore_args=how))
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {name(path): array for path, array in leaves if array is not ocp.PLACEHOLDER}


def name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


if __name__ == "__main__":
    for each, array in restore(Path(sys.argv[1]), *sys.argv[2:]).items():
        print(f"{each:60} {array.dtype} {list(array.shape)} on {len(array.sharding.device_set)} devices")
