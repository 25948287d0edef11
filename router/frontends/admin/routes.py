"""/v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form, for holders of an admin key."""

from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.answer_schema import ErrorBody
from tandem.router.frontends.openai.errors import described_error
from tandem.router.frontends.openai.middleware import LOAD_PATH, UNLOAD_PATH

NameField = Annotated[str, Field(max_length=256)]


class LoadAdapterBody(BaseModel):
    lora_name: NameField
    # PEFT directory below --lora-root.
    lora_path: str
    # Replace another content of this name.
    load_inplace: bool = False


class UnloadAdapterBody(BaseModel):
    lora_name: NameField


class LoadedAdapterObject(BaseModel):
    lora_name: str
    lora_path: str
    content_hash: str
    rank: int


class UnloadedAdapterObject(BaseModel):
    lora_name: str


def add_adapters(app: FastAPI, frontend: Frontend) -> None:
    loading = frontend.router.adapter_loading
    refused: dict[int | str, dict[str, Any]] = {403: described_error(ErrorBody, "the server has no admin key")}

    @app.post(LOAD_PATH, responses=refused)
    async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> LoadedAdapterObject:
        """Loads an adapter, which requests then name as their model. Needs an admin key."""
        with frontend.refusals_counted(request.state.request_id):
            adapter = await loading.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return LoadedAdapterObject(
            lora_name=body.lora_name, lora_path=adapter.path, content_hash=adapter.content_hash, rank=adapter.rank
        )

    @app.post(UNLOAD_PATH, responses=refused)
    async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> UnloadedAdapterObject:
        """Unloads an adapter. Its running requests end normally. Needs an admin key."""
        with frontend.refusals_counted(request.state.request_id):
            await loading.unload(body.lora_name)
        return UnloadedAdapterObject(lora_name=body.lora_name)
