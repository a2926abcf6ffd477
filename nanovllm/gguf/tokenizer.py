"""Build the tokenizer that a GGUF file describes in its metadata.

``tokenizer.ggml.model`` names one of two families:

    gpt2    byte-level BPE: the file lists the merges; how text is cut up before merging it does not spell
            out but name (``tokenizer.ggml.pre``), so the regular expressions are here
    llama   SentencePiece BPE: spaces are written as U+2581; the file gives each token a score, and of two
            neighbours those are merged first whose union has the best score, so merges follow from scores

Source: ``llama-vocab.cpp`` of llama.cpp; each choice was compared with transformers' tokenizers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from nanovllm.errors import CheckpointError
from nanovllm.gguf.reader import Value
from nanovllm.tokenizer import TokenizerParts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of ``tokenizer.ggml.token_type``. Others (unused, bytes) need no treatment."""

KEY = "tokenizer.ggml."
SPACE = "\u2581"

# Pieces of the regular expressions below, in the syntax of Oniguruma.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LEAD = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SIGNS = r" ?[^\s\p{L}\p{N}]+"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a byte-level vocabulary wants text cut before merging."""

    regex: str | None = None
    """Pieces are its matches and what lies between. None: those of GPT-2, built into ``tokenizers``."""
    single_digits: bool = False
    """Cut out every digit first."""
    compose: bool = False
    """Bring text into Unicode's composed form (NFC) first."""
    whole_words: bool = False
    """A piece that is a token as a whole is taken without merging."""
    add_bos: bool = False
    """Whether a prompt begins with BOS where the file does not say."""


GPT2 = Cut()
DIGITS = Cut(single_digits=True)
QWEN2 = Cut(regex=rf"{CONTRACTIONS}|{LEAD}\p{{L}}+|\p{{N}}|{SIGNS}[\r\n]*|{BLANKS}", compose=True)
LLAMA3 = Cut(
    regex=rf"{CONTRACTIONS}|{LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{SIGNS}[\r\n]*|{BLANKS}",
    whole_words=True,
    add_bos=True,
)
TEKKEN = Cut(
    regex=rf"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*|\p{{N}}|{SIGNS}[\r\n/]*|{BLANKS}",
    whole_words=True,
    add_bos=True,
)

CUTS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "mpt": GPT2,
    "olmo": GPT2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "codeshell": DIGITS,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "tekken": TEKKEN,
}
"""``tokenizer.ggml.pre`` -> how to cut."""


def build_tokenizer(metadata: Mapping[str, Value], path: str) -> TokenizerParts:
    """Build the tokenizer described in ``metadata``; ``path`` is for messages.

    Raises CheckpointError where the description is incomplete, contradicts itself, or names a kind of
    tokenizer that is not known. Takes a quarter of a second for 50,000 tokens with merges, and two
    seconds for the 262,144 of Gemma, half of them in finding merges.
    """
    return _Builder(metadata, path).build()


class _Builder:
    """Metadata of one file, and the steps from there to a tokenizer."""

    def __init__(self, metadata: Mapping[str, Value], path: str) -> None:
        self.metadata = metadata
        self.path = path
        self.tokens = self.strings("tokens")
        self.vocab = {token: number for number, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            raise self.error(f"{len(self.tokens)} tokens have {len(self.vocab)} different texts; each may occur once")
        told = KEY + "token_type" in metadata
        self.kinds = self.numbers("token_type") if told else [NORMAL] * len(self.tokens)

    def error(self, found: str) -> CheckpointError:
        """Build the error for a description that cannot be followed."""
        return CheckpointError(
            f"{self.path}: {found}. Convert the model again with a current llama.cpp, or use its original folder."
        )

    def strings(self, key: str) -> Sequence[str]:
        """Return a list of strings that must be there."""
        found = self.metadata.get(KEY + key)
        if not isinstance(found, list):
            raise self.error(f"{KEY}{key} is {type(found).__name__}; it must be a list of strings")
        return found

    def numbers(self, key: str) -> Sequence[float]:
        """Return a list of numbers, one for each token."""
        found = self.metadata.get(KEY + key)
        if not isinstance(found, tuple) or len(found) != len(self.tokens):
            size = len(found) if isinstance(found, tuple) else type(found).__name__
            raise self.error(f"{KEY}{key} is {size}; it must be {len(self.tokens)} numbers, one for each token")
        return found

    def token_id(self, name: str) -> int | None:
        """Return the id in ``tokenizer.ggml.<name>_token_id``, or None."""
        found = self.metadata.get(f"{KEY}{name}_token_id")
        if found is None:
            return None
        if not isinstance(found, int) or not 0 <= found < len(self.tokens):
            raise self.error(f"{KEY}{name}_token_id is {found!r}; it must be at least 0 and below {len(self.tokens)}")
        return found

    def build(self) -> TokenizerParts:
        """Put the parts together."""
        model = self.metadata.get(KEY + "model")
        if model == "gpt2":
            backend, add_bos = self.byte_level()
        elif model == "llama":
            backend, add_bos = self.sentencepiece()
        else:
            raise self.error(f"{KEY}model is {model!r}; known: 'gpt2', 'llama'")
        self.add_special(backend)
        self.add_bos(backend, add_bos)
        # Some models end a turn by another token than a text; both end a generation.
        ends = [self.token_id(name) for name in ("eos", "eot", "eom")]
        template = self.metadata.get("tokenizer.chat_template")
        return TokenizerParts(
            backend=backend,
            eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
            chat_template=template if isinstance(template, str) else None,
            special_tokens=self.special_tokens(),
        )

    def byte_level(self) -> tuple[Tokenizer, bool]:
        """Build the ``gpt2`` family; return it and whether it begins with BOS by default."""
        name = self.metadata.get(KEY + "pre")
        if name not in CUTS:
            known = ", ".join(sorted(CUTS))
            raise self.error(f"{KEY}pre is {name!r}, so it is not known how text is cut into words; known: {known}")
        cut = CUTS[str(name)]
        backend = Tokenizer(self.merging(self.merges_from_list(), ignore_merges=cut.whole_words))
        if cut.compose:
            backend.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        if cut.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if cut.regex is not None:
            steps.append(pre_tokenizers.Split(Regex(cut.regex), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.decoder = decoders.ByteLevel()
        return backend, cut.add_bos

    def merges_from_list(self) -> list[tuple[str, str]]:
        """Read the merges that the file lists, each as two tokens with a space between."""
        merges: list[tuple[str, str]] = []
        for merge in self.strings("merges"):
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise self.error(f"a merge in {KEY}merges is {merge!r}; it must be two tokens with a space")
            merges.append((left, right))
        return merges

    def sentencepiece(self) -> tuple[Tokenizer, bool]:
        """Build the ``llama`` family, which begins with BOS by default."""
        unknown = self.token_id("unknown")
        backend = Tokenizer(
            self.merging(
                self.merges_from_scores(),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces = normalizers.Replace(" ", SPACE)
        steps: list[decoders.Decoder] = [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        if self.metadata.get(KEY + "add_space_prefix", True):
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
            steps.append(decoders.Strip(" ", left=1, right=0))
        else:
            backend.normalizer = spaces
        backend.decoder = decoders.Sequence(steps)
        return backend, True

    def merges_from_scores(self) -> list[tuple[str, str]]:
        """List every way to make a normal token of two tokens, best score first.

        Of the ways to make one token, those with the longer left part come first, as in the conversions
        of Hugging Face. Other kinds of tokens are cut out of the text before anything is merged.
        """
        vocab, tokens = self.vocab, self.tokens
        scores = self.numbers("scores")
        merges: list[tuple[str, str]] = []
        for number in sorted(range(len(tokens)), key=scores.__getitem__, reverse=True):
            if self.kinds[number] == NORMAL:
                whole = tokens[number]
                # One expression, for speed: it looks at 1.7 million places to cut Gemma's tokens.
                merges += [
                    (whole[:cut], whole[cut:])
                    for cut in range(len(whole) - 1, 0, -1)
                    if whole[cut:] in vocab and whole[:cut] in vocab
                ]
        return merges

    def merging(self, merges: list[tuple[str, str]], **options: object) -> BPE:
        """Build the BPE model; its constructor checks that every merge is made of tokens."""
        try:
            return BPE(self.vocab, merges, **options)
        except Exception as error:  # the library raises no narrower type
            raise self.error(f"vocabulary and merges contradict each other: {error}") from error

    def add_special(self, backend: Tokenizer) -> None:
        """Register the tokens that are found in text before it is cut: control and user-defined ones."""
        for special, wanted in ((True, (UNKNOWN, CONTROL)), (False, (USER_DEFINED,))):
            found = [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in wanted and token]
            backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in found])

    def add_bos(self, backend: Tokenizer, default: bool) -> None:
        """Begin every text with BOS where the file, or else ``default``, says so.

        ``add_eos_token`` is not followed: a prompt that ends with end-of-text has nothing left to say.
        """
        if not self.metadata.get(KEY + "add_bos_token", default):
            return
        number = self.token_id("bos")
        if number is None:
            raise self.error(f"texts should begin with BOS, but there is no {KEY}bos_token_id")
        bos = self.tokens[number]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, number)]
        )

    def special_tokens(self) -> dict[str, str]:
        """Return the texts that a chat template may refer to."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        numbers = {role: self.token_id(name) for role, name in names.items()}
        return {role: self.tokens[number] for role, number in numbers.items() if number is not None}
