"""From a name on the hub to a folder with the model's files."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from ..errors import AccessError, ModelError, NotFoundError, UnreachableError

TEXTS = ["*.json", "*.jinja", "*.txt", "*.model"]
WEIGHTS = ["*.safetensors"]
PICKLED = ["*.bin"]
OTHERS = ["*/*", "consolidated*", "optimizer*", "training_args*"]  # the same in other forms, or what training left
PATIENCE = 2.0  # seconds that the hub may take to say what it has


def fetched(name: str, *, pickled: bool) -> Path:
    """The folder where the hub's files of a model are. Without the hub, those that were fetched before."""
    wanted = TEXTS + WEIGHTS + (PICKLED if pickled else [])
    try:
        folder = snapshot_download(name, allow_patterns=wanted, ignore_patterns=OTHERS, etag_timeout=PATIENCE)
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise explained(name, error) from error
    return Path(folder)


def explained(name: str, error: Exception) -> ModelError:
    """What is wrong with a name, in our words."""
    if isinstance(error, GatedRepoError):
        return AccessError(f"{name!r} is a gated model: {error}", hint="Ask for access on its page, then set HF_TOKEN.")
    if isinstance(error, RepositoryNotFoundError):
        return NotFoundError(f"the hub has no model {name!r}", hint="Check its name; a private one needs HF_TOKEN.")
    return UnreachableError(
        f"{name!r} is not on this machine, and the hub can't be asked for it: {str(error).splitlines()[0]}",
        hint="Give a folder, or connect.",
    )


def checked(folder: Path, *, pickled: bool) -> Path:
    """The folder of a model, if its files can be loaded without running what somebody hid in them."""
    if not (folder / "config.json").is_file():
        raise NotFoundError(f"{folder} has no config.json", hint="Fetch the model again.")
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")) and not pickled:
        raise NotFoundError(
            f"{folder} holds its weights in pickle files only, which can run code when they are loaded",
            hint="Take a model with .safetensors files, or give pickled=True if you trust whoever made it.",
        )
    return folder
