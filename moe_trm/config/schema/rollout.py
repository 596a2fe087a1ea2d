"""The rollout engine and its sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_trm.config.engines import DEFAULT, EngineTraits, traits_of
from moe_trm.config.schema.section import Count, Fraction, Positive, Section
from moe_trm.methods.weight_formats import WeightFormat
from moe_trm.runtime.addresses import in_the_clear


class ServerConfig(Section):
    """The server that `launch.rollout` starts. Where `rollout.url` points at a running one, only `startup_timeout_s`,
    `dtype` and `deterministic` are read."""

    host: str = "127.0.0.1"
    """Address to bind to. Anything but loopback needs `rollout.trusted_network`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 30100
    """TCP port; 0: any free one (only with `moe-trm train`, which tells both sides)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device on which the server computes; `auto`: CUDA where there is one."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Arithmetic of the rollout engine."""
    fp32_head: bool = False
    """Compute logits in float32 from the last hidden states and the output weight, as the learner always does, and
    everything before them in `rollout.server.dtype`. Weights are pushed and proved as without it. It costs a float32
    product over the vocabulary for each sampled token."""
    deterministic: bool = False
    """Batch-invariant kernels and a seed for each answer, so that the same prompts, weights and `seed` are sampled
    alike whatever else the server is doing (SGLang's deterministic inference). Slower. Needs CUDA, and
    `rollout.min_p=0`. Answers of a rollout function or an agent take their seeds in the order in which they are asked
    for."""
    max_total_tokens: Positive = 65536
    """KV cache size in tokens. Always set: the engine's own default may take all memory."""
    max_running_requests: Positive = 128
    """Requests that decode together; the rest wait in the server's queue."""
    chunked_prefill_size: Positive = 2048
    """Prompt tokens per prefill chunk."""
    tensor_parallel: Positive = 1
    """Devices that share the rollout model."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 180.0
    """Seconds that a server may take to load. Whatever asks it waits so long for its first answer, also a learner for
    a server that it did not start, for a router or for a teacher."""
    max_restarts: Count = 5
    """Times that a server which died or hangs is started again; after that it stays away."""
    silence_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """A server that says nothing for so many seconds, while its process neither computes nor waits for a processor,
    counts as hung. One that is busy gets until `hang_timeout_s`."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A server that generated nothing for so many seconds counts as hung, whatever else it does. Set it longer than a
    weight push takes, also on a loaded machine."""
    random_weights: bool = False
    """Begin with random weights in place of the checkpoint's. The first push, which every run makes before it samples,
    brings the real ones. What goes on computing with the weights of the start is found at that push
    (`sync.prove_every`), and the checkpoint is read once less. `moe-trm doctor` starts its server so."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of the engine's server, as typed on its command line."""


class RolloutConfig(Section):
    """The rollout engine and its sampling."""

    engine: str = DEFAULT
    """`sglang`, `vllm`: real servers (docs/engines.md). `bundle`: recorded responses, so that a run can be repeated bit
    for bit.
    `package.module:Engine` or `path/to/file.py:Engine`: an engine of your own (docs/pipeline.md)."""
    url: str | None = None
    """Address of a running server, e.g. http://127.0.0.1:30100; none: the one described in `rollout.server`."""
    urls: tuple[str, ...] = ()
    """Addresses of several running servers, in place of `rollout.url`. Each sample goes to the one with the fewest in
    flight, and all get every weight push. One that fails is left out until it has caught up."""
    router: str | None = None
    """Address of SGLang's router in front of the servers of `rollout.urls`, e.g. http://127.0.0.1:30000. It chooses the
    server of each sample, and is told which may be chosen. Weights, proofs and health checks go to the servers
    themselves. none: each sample goes to the server with the fewest in flight (docs/pipeline.md)."""
    api_key: str | None = None
    """Key of the server. None: taken from the environment variable MOE_TRM_API_KEY, else made for this run."""
    trusted_network: bool = False
    """Nobody but this run's machines listens on the network between learner and rollout servers. Needed where keys and
    samples cross it in the clear: for servers at `http://` that is not this machine, and for a server of this run that
    listens to others. Not needed for `https://` (docs/long_runs.md)."""
    bundle: str | None = None
    """`engine=bundle`: folder written by `record.bundle`."""
    bundle_delay_s: Annotated[float, Field(ge=0)] = 0.0
    """`engine=bundle`: seconds until each recorded answer is given, to see how a pipeline
    overlaps without an engine."""
    server: ServerConfig = ServerConfig()
    """The server to start."""
    quantization: str | None = None
    """Rounding of the weights that the engine is sent, by SGLang's name (`--quantization`), e.g. `fp8`. For servers
    that `rollout.url` points at, it is what they were started with. Rollouts then come from a policy of their own:
    `engine/*` measures it against the learner's with routes replayed, verdicts do not call it a fault, and corrections
    have to account for it. Needs CUDA and `sync.verify=false`: the engine's checksums are those of rounded weights.
    None: weights as they are sent."""
    fake_quantization: WeightFormat | None = None
    """The learner rounds the weights of attention, MLPs and experts to this format before each push, to study
    quantised rollouts on any hardware: the engine computes in `rollout.server.dtype` with weights that the format can
    hold. Pushes stay verified. As with `rollout.quantization`, rollouts come from a policy of their own, and probe
    steps say how much of the mismatch the rounding makes (`probe/quantization_k3_kl`). None: weights as they are."""
    fake_quantization_block: Positive | None = None
    """Side of the blocks of weights that share a scale, e.g. 128. None: one scale for each output channel."""
    norm_noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the noise on both norms of each block in pushed weights, at its first stage: rollouts
    explore more, and are from a policy of their own (QeRL). Evaluations are of the noisy policy; exported checkpoints
    have none. 0: no noise. Try 0.01."""
    norm_noise_end: Annotated[float, Field(gt=0)] = 1e-4
    """The same at the last stage; it falls geometrically in between."""
    norm_noise_stages: Positive = 10
    """Stages of `rollout.norm_noise`. With one interval without noise before them they share the run evenly."""
    fake_router_noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the noise on the router weights of every push, in units of each router's own: the engines
    route apart at a chosen dose, and differ in nothing else. An instrument for experiments (docs/precision.md).
    Evaluations by the engine are of the noisy policy; exported checkpoints have no noise. 0: none."""
    fake_router_noise_each_push: bool = False
    """A new draw of `rollout.fake_router_noise` for each push. False: one draw for the whole run, of its seed."""
    prompts_per_step: Positive = 16
    """Prompts per training step."""
    group_size: Positive = 8
    """Samples per prompt (the group that advantages compare)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by this before sampling and before scoring."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the most probable ids up to this mass; 1: all."""
    top_k: Positive | None = None
    """Kept ids at most; none: the vocabulary size, capped at the engine's limit of 4,096 when masks are recorded."""
    min_p: Fraction = 0.0
    """Ids less probable than this fraction of the most probable one are not sampled; 0: no bound."""
    max_new_tokens: Positive = 48
    """Tokens sampled at most for one answer (of a rollout function: for one turn). A longer
    answer counts as unfinished."""
    function: str | None = None
    """`package.module:function` or `path/to/file.py:function`: an async function of your own that makes a sample of
    several turns, e.g. with tools (docs/tasks.md); none: one answer to the prompt."""
    agent: str | tuple[str, ...] | None = None
    """`package.module:function` or `path/to/file.py:function`: an async function of your own that is given an address
    of OpenAI's interface and makes a sample with its client (docs/agents.md). A list, e.g. `[python, my_agent.py]`: a
    command line that is started for every sample, with the address in its environment. None: no agent."""
    function_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that one call of `rollout.function` or `rollout.agent` may take, waiting for the engine included. After
    that its sample is rejected (`rollout_timeout`)."""
    max_turns: Positive = 8
    """Answers in one sample at most, for `rollout.function` and `rollout.agent`; a sample that wants more counts as
    unfinished."""
    max_tokens: Positive | None = None
    """Tokens of one sample at most, prompt and appended text included, for `rollout.function` and `rollout.agent`;
    none: what the model's positions allow."""
    colocate: bool = False
    """The engine shares its GPUs with the learner. While the learner works, the engine's weights and KV cache leave
    device memory; they come back with the next weight push. Needs `pipeline.mode=sync`, and with `rollout.url` servers
    started with `--enable-memory-saver`. On CPU the engine takes the same steps but frees nothing."""
    concurrency: Positive = 128
    """Requests in flight."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Limit for one request, queueing included."""
    max_attempts: Positive = 3
    """Tries per request when the connection fails or the server answers 5xx. After that the server is checked, and
    the sample is asked for again."""
    recovery_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest time without any working server, in seconds, before the run is given up. A restart takes
    as long as loading the model."""

    @property
    def has_turns(self) -> bool:
        """True when a sample may have several answers."""
        return self.function is not None or self.agent is not None

    @property
    def may_have_turns(self) -> bool:
        """False where every sample is one answer; a recording may hold several turns."""
        return self.has_turns or not self.traits.samples_live

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of every server of the run."""
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        return self.urls or (self.url or f"http://{host}:{self.server.port}",)

    @property
    def attached(self) -> bool:
        """True when the servers are started by somebody else."""
        return bool(self.urls or self.url)

    @property
    def in_the_clear(self) -> tuple[str, ...]:
        """Addresses of servers to which the key is sent over a network without encryption."""
        if not self.traits.has_servers:
            return ()
        return in_the_clear((*self.addresses, *([self.router] if self.router else [])))

    @property
    def traits(self) -> EngineTraits:
        """The capabilities of `engine`. Raises `ConfigError` for one that is not known or cannot be loaded."""
        return traits_of(self.engine)

    @property
    def truncates(self) -> bool:
        """True where some ids cannot be sampled."""
        return self.top_p < 1 or self.min_p > 0 or self.top_k is not None

    @property
    def rounds_weights(self) -> str | None:
        """Format to which the engine's weights are rounded on purpose, or `noise`; None: they are the learner's."""
        return self.quantization or self.fake_quantization or ("noise" if self.norm_noise else None)

    @property
    def starts_server(self) -> bool:
        """True where the run starts the server of `server`."""
        return self.traits.has_servers and not self.attached
