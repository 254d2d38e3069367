"""The secrets of an installation: tokens by role, and a certificate of the service.

They are written as files that only their owner can read. Kustomize makes Secrets of them, one per role.
"""

import json
import os
import pathlib
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DAYS = 365  # for which the certificate is valid


@dataclass(frozen=True, kw_only=True)
class InstallSecrets:
    """Everything secret in an installation."""

    operator_token: str = field(repr=False)
    """The token of the person who installs; no pod but the service's gets it."""
    node_token: str = field(repr=False)
    certificate: str
    """The certificate of the service, by which agents and users recognise it."""
    key: str = field(repr=False)

    @property
    def tokens(self) -> str:
        """The content of the service's token file."""
        entries = [
            {"token": self.operator_token, "role": "operator"},
            {"token": self.node_token, "role": "node"},
        ]
        return json.dumps({"tokens": entries}, indent=2) + "\n"


def make(names: Sequence[str]) -> InstallSecrets:
    """Make new secrets; the certificate is for these host names. Raises OSError if openssl is missing."""
    certificate, key = _certificate(names)
    return InstallSecrets(
        operator_token=secrets.token_urlsafe(32),
        node_token=secrets.token_urlsafe(32),
        certificate=certificate,
        key=key,
    )


def _certificate(names: Sequence[str]) -> tuple[str, str]:
    """Return a self-signed certificate for these names, and its private key."""
    alternatives = ",".join(f"DNS:{name}" for name in names) + ",IP:127.0.0.1"
    with tempfile.TemporaryDirectory() as folder:  # with mode 0700
        certificate, key = pathlib.Path(folder, "tls.crt"), pathlib.Path(folder, "tls.key")
        command = ["openssl", "req", "-x509", "-nodes", "-days", str(DAYS)]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-subj", "/CN=jaxgoodput", "-addext", f"subjectAltName={alternatives}"]
        command += ["-keyout", str(key), "-out", str(certificate)]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except FileNotFoundError:
            raise FileNotFoundError(
                "the certificate of the service cannot be made, because there is no program `openssl` here. "
                "Install it."
            ) from None
        except subprocess.CalledProcessError as error:
            raise OSError(
                f"the certificate of the service cannot be made: openssl said {error.stderr.strip()!r}."
            ) from None
        return certificate.read_text(), key.read_text()


def write_secret(path: pathlib.Path, text: str) -> None:
    """Write a file that only its owner can read, also while it is being written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(path, flags, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)  # a file that was there keeps its mode otherwise
        file.write(text)


def write_secrets(folder: pathlib.Path, files: Mapping[str, str]) -> None:
    """Write several files of one folder, each as `write_secret` does."""
    for name, text in files.items():
        write_secret(folder / name, text)
