"""Options that commands share, by their types."""

from typing import Annotated

import typer

from kvjax.memory.shapes import SHAPES

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A folder or a hub id; by default the embedded model."),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub id; by default its main branch.")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; by default the best for the device."),
]
Cache = Annotated[
    str,
    typer.Option(
        help="The cache policy: static, dynamic, sliding_window, hybrid, quantized, offloaded, "
        "offloaded_static, auto or paged, with settings where wanted: NAME,SETTING=VALUE,..."
    ),
]
Bits = Annotated[
    int | None, typer.Option(help="Quantize the cache: 8, 4, 3, 2 or 1 bits a number.")
]
KeyBits = Annotated[int | None, typer.Option(help="The same for keys alone.")]
ValueBits = Annotated[int | None, typer.Option(help="The same for values alone.")]
Group = Annotated[int | None, typer.Option(help="Numbers that share a scale; by default 64.")]
Window = Annotated[int | None, typer.Option(help="Of sliding_window: tokens that a layer keeps.")]
Sinks = Annotated[
    int | None, typer.Option(help="Of sliding_window: first tokens that are kept for ever.")
]
Prefetch = Annotated[
    int | None,
    typer.Option(help="Of a cache on the host: fetch layers so many ahead of their turn."),
]
CacheMemory = Annotated[
    str | None,
    typer.Option(help="Of --cache auto: what it may take of the device: 8GiB, 500MB."),
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest that make up p.")]
MinP = Annotated[
    float | None, typer.Option(help="Sample among those of at least p times the likeliest.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1, tokens seen before become less likely.")
]
TypicalP = Annotated[
    float | None,
    typer.Option(help="Sample among those about as surprising as expected that make up p."),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(help="Make new tokens less likely for each time that they came: -2 to 2."),
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Make new tokens that came at all less likely: -2 to 2.")
]
NoRepeatNgramSize = Annotated[
    int | None, typer.Option(help="No run of so many tokens twice in prompt and text.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="Add to a token's logit: TOKEN=NUMBER, as 13=-100; may be repeated."),
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End the text before this string; may be repeated.")
]
RotaryLen = Annotated[
    int | None,
    typer.Option(
        help="The length of text that longrope and dynamic rotary frequencies go by; by default "
        "what the cache can hold.",
        min=1,
    ),
]
Mesh = Annotated[
    str,
    typer.Option(
        help="Devices to share the work: data=2,tensor=2,sequence=2. By default (auto) a model "
        "that one device has no memory for is spread over the local ones; with --distributed, "
        "every model over all of them.",
    ),
]
Distributed = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="One of many processes that run the same command, each with its own devices; only the "
        "first prints. Who is who comes from the next three, or from the cluster, where JAX knows "
        "it (Slurm, Open MPI, Kubernetes, TPU).",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        envvar="JAX_COORDINATOR_ADDRESS",
        help="Host and port where process 0 listens: 10.0.0.1:1234.",
    ),
]
Processes = Annotated[
    int | None, typer.Option(envvar="JAX_NUM_PROCESSES", help="How many there are.")
]
ProcessId = Annotated[
    int | None, typer.Option(envvar="JAX_PROCESS_ID", help="Which this one is, 0 the first.")
]
StartTimeout = Annotated[
    int, typer.Option(help="Seconds to wait for the other processes at the start.")
]
Heartbeat = Annotated[
    int, typer.Option(help="Seconds of silence after which a process counts as ended.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
KnownShape = Annotated[str | None, typer.Option(help=f"A well-known shape: {', '.join(SHAPES)}.")]
