"""A whole coordinator: both APIs over one pipeline, and everything under them."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets

from coordinator.clients import WorkerClients
from coordinator.config import CoordinatorConfig
from coordinator.connection_age import ConnectionAge
from coordinator.front import Front
from coordinator.http_server import HttpServer
from coordinator.intake import Intake
from coordinator.openai_api import OpenAIApi
from coordinator.pipeline import Pipeline
from coordinator.registry import Pool, Registry
from coordinator.router import Router
from coordinator.servicer import CoordinatorInfo, CoordinatorServicer
from kvbraid.address import join_address
from kvbraid.chat_template import ChatTemplate
from kvbraid.rpc.channels import ChannelPool, token_stream_options
from kvbraid.rpc.server import RpcServer
from kvbraid.rpc.tls import https_context
from kvbraid.telemetry.endpoint import MetricsEndpoint
from kvbraid.telemetry.metrics import CoordinatorMetrics
from kvbraid.tokenizer import Tokenizer
from kvbraid.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from kvbraid.v1.info_pb2_grpc import add_InfoServiceServicer_to_server

logger = logging.getLogger(__name__)

# A ready coordinator should know all its workers, but not wait for one that is gone.
_ALL_WORKERS_WAIT_S = 2.0
# Calls that clients began before they were told to go elsewhere arrive and are still taken.
_ON_THEIR_WAY_S = 0.2


class CoordinatorServer(RpcServer):
    """The gRPC server, with the HTTP API, the registry and the channels as part of its life."""

    def __init__(self, config: CoordinatorConfig, tokenizer: Tokenizer) -> None:
        """To be called inside a running event loop. Raises CheckpointError for a bad template."""
        metrics = CoordinatorMetrics()
        super().__init__(
            role="coordinator",
            settings=config.server,
            metrics=metrics.rpc,
            options=config.connection_options(),
        )
        self.metrics = metrics
        self.incarnation = secrets.randbits(64)
        self._config = config
        self._channels = ChannelPool(config.server, token_stream_options())
        clients = WorkerClients(self._channels)
        self.registry = Registry(
            prefill=config.routing.prefill_workers,
            decode=config.routing.decode_workers,
            make_client=clients.info,
            poll_s=config.routing.poll_seconds,
            recovery_s=config.routing.recovery_seconds,
            vocab_size=tokenizer.vocab_size,
            metrics=metrics.placement,
        )
        template = tokenizer.facts.chat_template
        intake = Intake(
            tokenizer=tokenizer,
            template=ChatTemplate(template, tokenizer.facts.named_tokens) if template else None,
            registry=self.registry,
            served_model_name=config.api.served_model_name,
        )
        pipeline = Pipeline(
            registry=self.registry,
            router=Router(self.registry, config.routing, metrics),
            clients=clients,
            tokenizer=tokenizer,
            settings=config.routing,
            metrics=metrics,
            incarnation=self.incarnation,
        )
        self._front = Front(intake, pipeline, metrics.request)
        self._http = self._http_server(tokenizer)
        self._metrics_endpoint: MetricsEndpoint | None = None
        self._readiness: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    def _http_server(self, tokenizer: Tokenizer) -> HttpServer:
        config = self._config
        api = OpenAIApi(
            front=self._front,
            registry=self.registry,
            tokenizer=tokenizer,
            settings=config.api,
            admission=self.admission,
        )
        application = api.application()
        ConnectionAge(
            config.connections.max_connection_age_seconds or math.inf,
            is_leaving=lambda: self.admission.is_draining,
        ).limit(application)
        return HttpServer(
            application,
            host=config.server.host,
            port=config.api.http_port,
            tls=https_context(config.server.tls),
        )

    @property
    def http_address(self) -> str:
        """host:port of the OpenAI API, known after `start`."""
        return join_address(self.settings.reachable_host, self._http.port)

    @property
    def metrics_address(self) -> str:
        """host:port of the Prometheus endpoint, known after `start`."""
        return self._metrics_endpoint.address if self._metrics_endpoint else ""

    async def start(self) -> int:
        """Listens on all ports and begins to follow the workers; returns the gRPC port.

        Health says SERVING while a decode worker is up. Raises StartupError for a taken port.
        """
        endpoint = MetricsEndpoint(
            self.metrics.registry, host=self.settings.host, port=self.settings.metrics_port
        )
        self._metrics_endpoint = endpoint
        await self._http.start()
        servicer = CoordinatorServicer(
            self._front, request_timeout_s=self._config.api.request_timeout_seconds
        )
        self.add(
            add_CoordinatorServiceServicer_to_server,
            servicer,
            "kvbraid.v1.CoordinatorService",
        )
        info = CoordinatorInfo(
            registry=self.registry,
            front=self._front,
            incarnation=self.incarnation,
            metrics_address=self.metrics_address,
            http_address=self.http_address,
            num_running=lambda: self.num_running,
        )
        self.add(add_InfoServiceServicer_to_server, info, "kvbraid.v1.InfoService")
        port = await super().start()
        await self.registry.start()
        self._readiness = asyncio.create_task(self._follow_readiness())
        return port

    async def wait_serving(self) -> None:
        """Returns once a decode worker is up, and all configured workers are or were waited for."""
        while not self.registry.up(Pool.DECODE):
            await self.registry.wait_changed(1.0)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _ALL_WORKERS_WAIT_S
        while not self.registry.are_all_known and loop.time() < give_up:
            await self.registry.wait_changed(give_up - loop.time())

    async def drain(self) -> bool:
        """See RpcServer. Clients that keep a connection are told to make another one, which a
        Service lets reach another coordinator: refused there, they would try again here."""
        self._leaving = asyncio.create_task(self._server.stop(self.settings.drain_seconds))
        await asyncio.sleep(_ON_THEIR_WAY_S)
        return await super().drain()

    async def stop(self) -> None:
        """Closes everything; running requests are cancelled."""
        if self._readiness is not None:
            self._readiness.cancel()
        await self._http.stop()
        await super().stop()
        if self._leaving is not None:
            await self._leaving
        await self.registry.stop()
        await self._channels.close()
        if self._metrics_endpoint is not None:
            await asyncio.to_thread(self._metrics_endpoint.close)

    async def _follow_readiness(self) -> None:
        await self.wait_serving()
        while True:
            await self.set_serving(bool(self.registry.up(Pool.DECODE)))
            await self.registry.wait_changed(60.0)
