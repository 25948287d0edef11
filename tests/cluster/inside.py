"""Calls to a cluster's internal ports, as one of its processes."""

import grpc

from tandem.config import SERVER_NAME
from tandem.deploy.launcher import Cluster

OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.ssl_target_name_override", SERVER_NAME)]


def open_inside(cluster: Cluster, address: str) -> grpc.Channel:
    """Open a channel with the cluster's certificate, if any. Calls still need the cluster token."""
    if cluster.cluster_tls is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    tls = cluster.cluster_tls.read()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert), options=OPTIONS)
