"""Building blocks of decoders. What a layer reads comes in through ``forward``; nothing is set behind its back."""
