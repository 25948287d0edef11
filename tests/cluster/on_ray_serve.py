"""Calls Ray Serve as KubeRay's operator does, in its own process."""

import sys

import ray
from ray import serve

from tandem.deploy.joined.ray_service import application

APPLICATION = "tandem"


def main(what: str, address: str, port: str, *arguments: str) -> None:
    ray.init(address, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    if what == "deploy":
        config, name = arguments
        serve.run(application({"config": config, "name": name}), name=APPLICATION, route_prefix="/tandem")
    elif what == "delete":
        serve.delete(APPLICATION)
        serve.shutdown()
    else:
        for app in serve.status().applications.values():
            print(app.status.value, app.message, *(deployment.message for deployment in app.deployments.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
