"""The child process that holds a Hugging Face model. Only ``wire`` is for the parent too; the rest needs torch."""
