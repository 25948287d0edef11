"""The Ray node of this process."""

# Node labels that name a rack. The first one present counts.
RACK_LABELS = ("rack", "ray.io/availability-zone")


def own_address() -> str:
    """Returns the node's address in the Ray."""
    from tandem.deploy.on_ray.ray_module import ray_worker

    assert ray_worker._global_node is not None
    address: str = ray_worker._global_node.node_ip_address
    return address


def own_rack() -> str:
    """Returns "" if no label names it."""
    from tandem.deploy.on_ray.ray_module import ray

    labels = ray.get_runtime_context().get_node_labels()
    return next((str(labels[name]) for name in RACK_LABELS if labels.get(name)), "")
