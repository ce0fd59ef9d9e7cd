"""The section of docs/algorithms.md on what sampling does to log-probs."""

SAMPLING = """\
## Sampling and log-probs

μ (`rollout_logprobs`) is the distribution that a token was drawn from, after everything in `sampling`. What the learner computes for π
and π_old, and the reference model for π_ref, depends on the setting:

| setting | learner and reference | under equal weights |
|---|---|---|
| `temperature` | logits divided by it | π = μ |
| `top_k`, `top_p`, `min_p` | the softmax over the tokens that their own logits keep, and the sampled token | π = μ |
| `max_tokens`, `stop`, `ignore_eos` | they end a completion, and change no probability | π = μ |
| `min_tokens`, `presence_penalty`, `frequency_penalty`, `repetition_penalty`, `logit_bias`, `bad_words`, `json_schema`, `regex`, \
`choice`, `grammar` | the softmax without them | π ≠ μ: *biased* |

* Truncation is recomputed. Each network keeps what its own logits keep, as the engine would under the same weights; entropy and KL are of
  these distributions, and a dropped token has no gradient. DeepSeek-V3.2 (arXiv:2512.02556) keeps the rollout's own set instead. The two
  differ once weights have moved, by tokens at the edge of the set. A sampled token that falls below the edge counts as kept: its ratio is
  finite. Tokens that are exactly as likely as the last kept one are all kept.
* For a *biased* setting π/μ is an importance weight, and not 1 on policy. It corrects the difference for tokens that the engine can draw.
  A mask is a bias that no weight corrects: π gives probability to tokens that are never drawn. With π_old = μ the clip acts on this
  weight; `proximal: recompute` clips around the learner's own π_old, and a correction (`tis`) bounds the weight. `mismatch/mean_abs_nats`
  is the size of the difference; `treadwheel check` and the event `biased_sampling` name the settings. In the quickstart's first step it
  is 2e-7 with `top_p: 0.8`, and 0.03 with `presence_penalty: 1`.
* The engine's log-probs are vLLM's *processed* ones. Its *raw* ones are before temperature and after a structure's mask, so they are
  neither μ nor a softmax that a learner computes, and they would hide the bias: the mismatch would read 0.
* An engine that computes logits in bfloat16 (`rollout.head_dtype`) may keep another token at the edge than the float32 learner."""
