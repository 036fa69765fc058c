"""The paths of the server, and its errors, as the SDK's client expects them.

Calls that are refused are futures with an error of category `user`, which the client raises as
RequestFailedError; where it expects an answer at once, they have a status of 400.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from skyrl_fast.gateway.messages import ApiError
from skyrl_fast.gateway.server import key_of, read_body
from skyrl_fast.system.printable import log_line
from skyrl_fast.tinker.chat import ChatDoor
from skyrl_fast.tinker.futures import TRAINING, CallAnswer, CallFuture, GoneError
from skyrl_fast.tinker.service import TinkerService
from skyrl_fast.tinker.sessions import UnknownSessionError
from skyrl_fast.tinker.wire import RefusedCallError

log = logging.getLogger(__name__)

API = "/api/v1"
POLL_SECONDS = 20.0  # for which a request for an answer waits; the client gives up after 45
ENDED = "the session has ended, or the server was started again: create a ServiceClient again"
# Optional parts of the client that stay off: they need paths that are not served.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    # The server is on this machine: an answer takes as long as it takes.
    "sample_enable_stuck_detection": False,
}
# That clients ask for again during a run.
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

Handler = Callable[[Request], Awaitable[Response]]


class TinkerApp:
    """An ASGI application that answers the SDK's client.

    Args:
        key: that clients must send.
    """

    def __init__(self, service: TinkerService, key: str) -> None:
        self._service = service
        self._key = key
        self._router = Router(routes=self._routes(), default=self._refuse_path)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._router(scope, receive, send)

    def _routes(self) -> list[Route]:
        service = self._service
        immediate: dict[str, Callable[[dict[str, Any]], Any]] = {
            "create_session": self._create_session,
            "session_heartbeat": service.heartbeat,
            "create_sampling_session": service.sampling.create_sampling_session,
            "get_info": service.models.get_info,
            "weights_info": service.checkpoints.weights_info,
        }
        later: dict[str, Callable[[dict[str, Any]], CallFuture]] = {
            "create_model": service.models.create_model,
            "load_weights": service.models.load_weights,
            "optim_step": service.training.optim_step,
            "save_weights": service.training.save_weights,
            "save_weights_for_sampler": service.training.save_weights_for_sampler,
            "asample": service.sampling.sample,
        }
        routes = [self._post(path, self._immediate(handle)) for path, handle in immediate.items()]
        routes += [self._post(path, self._later(handle)) for path, handle in later.items()]
        routes += [
            self._post("client/config", self._config),
            self._post("client/dynamic_config", self._dynamic_config),
            self._post("telemetry", self._swallow),
            self._post("forward_backward", self._forward_backward),
            self._post("unload_model", self._unload_model),
            self._post("retrieve_future", self._retrieve),
            self._post("cancel_future", self._cancel),
            self._post("sessions/{session}/finish", self._finish),
            self._get("healthz", self._health),
            self._get("get_server_capabilities", self._capabilities),
            self._get("checkpoints", self._checkpoints),
            self._get("training_runs/{run}", self._training_run),
            self._get("training_runs/{run}/checkpoints", self._checkpoints),
            self._get("samplers/{sampler}", self._sampler),
        ]
        checkpoint = "training_runs/{run}/checkpoints/{kind}/{name}"
        chat = ChatDoor(service, self._check_key)
        return [*routes, self._route(checkpoint, self._delete, "DELETE"), *chat.routes()]

    def _post(self, path: str, handle: Handler) -> Route:
        return self._route(path, handle, "POST")

    def _get(self, path: str, handle: Handler) -> Route:
        return self._route(path, handle, "GET")

    def _route(self, path: str, handle: Handler, method: str) -> Route:
        async def endpoint(request: Request) -> Response:
            return await self._answer(request, handle)

        return Route(f"{API}/{path}", endpoint, methods=[method])

    async def _answer(self, request: Request, handle: Handler) -> Response:
        try:
            self._check_key(request)
            return await handle(request)
        except RefusedCallError as error:
            failure = ApiError(400, str(error))
        except UnknownSessionError as error:
            failure = ApiError(410, f"session {log_line(error)}: {ENDED}")
        except ApiError as error:
            failure = error
        except ClientDisconnect:
            return Response(status_code=499)
        log.info("%s: %d: %s", request.url.path, failure.status, log_line(failure.message))
        return JSONResponse({"detail": failure.message}, failure.status)

    def _check_key(self, request: Request) -> None:
        if not hmac.compare_digest(key_of(request).encode(), self._key.encode()):
            raise ApiError(401, "wrong API key: TINKER_API_KEY is the one that was printed")

    async def _refuse_path(self, scope: Any, receive: Any, send: Any) -> None:
        path = log_line(scope["path"])
        log.warning("a client asks for %s, which is not served", path)
        text = f"{path} is not served by skyrl-fast tinker"
        await JSONResponse({"detail": text}, 404)(scope, receive, send)

    def _immediate(self, handle: Callable[[dict[str, Any]], Any]) -> Handler:
        async def endpoint(request: Request) -> Response:
            return JSONResponse(handle(await _json(request)))

        return endpoint

    def _later(self, handle: Callable[[dict[str, Any]], CallFuture]) -> Handler:
        async def endpoint(request: Request) -> Response:
            body = await _json(request)
            return self._accept(lambda: handle(body))

        return endpoint

    def _accept(self, submit: Callable[[], CallFuture]) -> Response:
        """Answer with a future, which has failed already if the call is refused."""
        try:
            future = submit()
        except RefusedCallError as error:
            future = self._service.futures.new(TRAINING)
            self._service.futures.finish(future, CallAnswer.of_failure(error))
        return JSONResponse(future.accepted())

    # --- paths that are more than a call of the service

    def _create_session(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._service.create_session(body)
        answer["info_message"] = f"skyrl-fast tinker serves {self._service.base.names[0]}"
        answer["warning_message"] = self._service.next_warning()
        return answer

    async def _config(self, request: Request) -> Response:
        return JSONResponse(CLIENT_CONFIG)

    async def _dynamic_config(self, request: Request) -> Response:
        return JSONResponse(DYNAMIC_CONFIG)

    async def _swallow(self, request: Request) -> Response:
        await read_body(request)
        return JSONResponse({"status": "accepted"})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, request: Request) -> Response:
        return JSONResponse(self._service.capabilities())

    async def _forward_backward(self, request: Request) -> Response:
        content = await read_body(request)
        return self._accept(lambda: self._service.training.forward_backward(content))

    async def _unload_model(self, request: Request) -> Response:
        answer = await self._service.models.unload_model(await _json(request))
        future = self._service.futures.new(TRAINING)
        self._service.futures.finish(future, CallAnswer.of_json(answer))
        return JSONResponse(future.accepted())

    async def _retrieve(self, request: Request) -> Response:
        request_id = str((await _json(request)).get("request_id"))
        try:
            answer = await self._service.futures.fetch(request_id, POLL_SECONDS)
        except GoneError:
            raise ApiError(410, f"there is no future {log_line(request_id)} any more") from None
        if answer is None:
            body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(body, 408)
        return Response(answer.content, media_type=answer.media_type)

    async def _cancel(self, request: Request) -> Response:
        self._service.sampling.cancel(str((await _json(request)).get("request_id")))
        return JSONResponse({})

    async def _finish(self, request: Request) -> Response:
        await self._service.end_session(request.path_params["session"])
        return JSONResponse({})

    async def _checkpoints(self, request: Request) -> Response:
        return JSONResponse(
            self._service.checkpoints.list_checkpoints(request.path_params.get("run"))
        )

    async def _training_run(self, request: Request) -> Response:
        return JSONResponse(self._service.checkpoints.training_run(request.path_params["run"]))

    async def _sampler(self, request: Request) -> Response:
        return JSONResponse(self._service.sampling.get_sampler(request.path_params["sampler"]))

    async def _delete(self, request: Request) -> Response:
        names = request.path_params
        self._service.checkpoints.delete_checkpoint(names["run"], names["kind"], names["name"])
        return JSONResponse({})


async def _json(request: Request) -> dict[str, Any]:
    content = await read_body(request)
    try:
        value = json.loads(content) if content else {}
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body: expected a JSON object, got {type(value).__name__}")
    return value
