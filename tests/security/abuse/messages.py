"""Attacks by gRPC messages and metadata."""

import asyncio
from typing import Any

import grpc

from broker.api.proto.gpubroker.v1 import job_service_pb2 as pb
from broker.api.proto.gpubroker.v1 import job_service_pb2_grpc as stubs
from tests.security.abuse.registry import attack
from tests.security.abuse.target import Target, repeated


async def _refused(call: Any) -> None:
    try:
        await call
    except grpc.aio.AioRpcError:
        return


@attack
async def compressed_messages(target: Target, seconds: float) -> None:
    """Send messages of a few kilobytes that would inflate to the limit, with and without a token."""
    large = pb.SubmitJobRequest()
    large.spec.env["A"] = "x" * (3 * 1024**2)
    signed = (("authorization", f"Bearer {target.attacker}"),)
    async with grpc.aio.insecure_channel(target.grpc, compression=grpc.Compression.Gzip) as channel:
        stub = stubs.JobServiceStub(channel)
        await repeated(
            seconds,
            lambda: asyncio.gather(*(_refused(stub.SubmitJob(large, metadata=given)) for given in ((), signed))),
        )


@attack
async def messages_of_very_many_values(target: Target, seconds: float) -> None:
    large, many = pb.SubmitJobRequest(), pb.SubmitJobRequest()
    large.spec.labels.update({f"k{i}": "v" for i in range(200_000)})  # more bytes than are parsed
    many.spec.labels.update({f"k{i}": "v" for i in range(100_000)})
    signed = (("authorization", f"Bearer {target.attacker}"),)
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        stub = stubs.JobServiceStub(channel)
        await repeated(
            seconds,
            lambda: asyncio.gather(*(_refused(stub.SubmitJob(m, metadata=signed)) for m in (large, many))),
            parallel=1,
        )


@attack
async def large_metadata(target: Target, seconds: float) -> None:
    filler = tuple((f"filler-{i}", "x" * 4000) for i in range(200))
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        stub = stubs.JobServiceStub(channel)
        await repeated(seconds, lambda: _refused(stub.ListJobs(pb.ListJobsRequest(), metadata=filler)))
