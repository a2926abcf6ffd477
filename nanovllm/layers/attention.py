"""Self-attention over the paged cache."""

from jaxtyping import Float
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.config import ModelConfig
from nanovllm.kv_cache import KVCache
from nanovllm.layers.linear import Linear, MergedLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import Angles
from nanovllm.ops.rotate_and_store import rotate_and_store


class Attention(nn.Module):
    """Write this step's keys and values to the cache, then attend over all of each request.

    ``norm`` is the kind of norm that each query and key head goes through before the rotation (Qwen3, Gemma 3);
    None for none. ``scale`` multiplies the scores; None: 1 / sqrt(head_dim). ``softcap`` bounds them.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        norm: type[RMSNorm] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        adds: bool = True,
    ) -> None:
        super().__init__()
        self.adds = adds
        self.layer, self.is_last = layer, layer == config.num_layers - 1
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.window = config.windows[layer]
        self.scale, self.softcap = self.head_dim**-0.5 if scale is None else scale, softcap
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=qkv_bias)
        self.o_proj = Linear(query, config.hidden_size, bias=output_bias)
        self.q_norm = None if norm is None else norm(self.head_dim, config.norm_eps)
        self.k_norm = None if norm is None else norm(self.head_dim, config.norm_eps)

    def forward(
        self,
        x: Float[Tensor, "... tokens width"],
        residual: Float[Tensor, "tokens width"] | None,
        norm: RMSNorm,
        angles: Angles,
        cache: KVCache,
        batch: Batch,
    ) -> tuple[Float[Tensor, "... kept width"], Float[Tensor, "kept width"] | None]:
        """Attend to the norm of x + residual; return two summands, or their sum, as ``Linear.plus`` does.

        Unless it ``adds``: then return (what comes out, whole; x + residual), for a norm in between. The last layer
        returns the batch's ``hidden_rows``.
        """
        projected, total = self.qkv_proj.after_norm(x, residual, norm)
        qkv = projected.view(projected.shape[0], -1, self.head_dim)  # [tokens, heads + 2 kv_heads, head_dim]
        q_norm, k_norm, scales = self.q_norm, self.k_norm, cache.scales(self.layer)
        norms = None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
        keys, values = cache.layer(self.layer)
        cap = self.softcap
        if batch.attend_fresh is not None:
            out = batch.attend_fresh(
                qkv, norms, *angles, keys, values, batch.plan, self.scale, self.window, *scales, softcap=cap
            )
        else:
            q = rotate_and_store(qkv, norms, *angles, *cache.slots(self.layer), batch.slot_mapping, *scales)
            out = batch.attend(q, keys, values, batch.plan, self.scale, self.window, *scales, softcap=cap)
        if self.is_last and batch.hidden_rows is not None:
            out, total = out[batch.hidden_rows], total[batch.hidden_rows]
        return self.o_proj.plus(out.flatten(1), total) if self.adds else (self.o_proj(out.flatten(1)), total)
