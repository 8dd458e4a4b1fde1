"""Certificates of a run: made, read from files, and told apart where two ends do not fit.

An authority is made for one run (or, by ``streamrl certs``, for a group of hosts), signs one certificate and is
thrown away: nobody can sign another. The certificate is made out to the run's name, not to hosts, since a scheduler
names those only when it starts something: a client asks for that name (gRPC's ``ssl_target_name_override``) wherever
it calls. It serves for both ends of a connection; whoever holds its key is of the run, as whoever holds the token is.
The hosts that are known are in it as well, for tools that ask for the host.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from streamrl_jax.errors import UserError

CA_FILE: Final = "ca.pem"
CERT_FILE: Final = "cert.pem"
KEY_FILE: Final = "key.pem"

DAYS: Final = 90
"""Days that made certificates are valid."""

_OURS: Final = "streamrl run"
"""Organisation of an authority that was made here; its common name is the run's name."""
_SKEW: Final = datetime.timedelta(hours=1)
"""Clocks of two hosts may differ by so much."""
_LONGEST_NAME: Final = 63
"""Characters of one label of a name in DNS."""


@dataclass(frozen=True)
class Material:
    """What one process needs for TLS, as PEM."""

    ca: bytes
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        """What the certificates are made out to; empty where the authority was not made here."""
        subject = _certificates(self.ca)[0].subject
        organisations = subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
        if not organisations or organisations[0].value != _OURS:
            return ""
        return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)

    @property
    def ends(self) -> datetime.datetime:
        """When the first of its certificates is no longer valid."""
        return min(one.not_valid_after_utc for one in _certificates(self.ca + self.certificate))


def make(name: str, hosts: Sequence[str] = (), days: float = DAYS) -> Material:
    """Makes an authority, a certificate of it and its key (ECDSA on P-256), and forgets the authority's key.

    Args:
        name: of the run: what the certificate is made out to.
        hosts: names and addresses of hosts, beside this one's.
        days: how long they are valid.

    Returns:
        The material.
    """
    name = name[:_LONGEST_NAME].strip("-.")
    now = datetime.datetime.now(datetime.UTC)
    begin, end = now - _SKEW, now + datetime.timedelta(days=days)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _subject(name)
    ca = (
        _builder(issuer, issuer, authority.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        _builder(issuer, _subject(f"member of {name}"[:64]), key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternative_names(name, hosts)), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return Material(
        ca.public_bytes(pem),
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def write(material: Material, directory: Path) -> None:
    """Writes the three files, readable by their owner only; each is whole or not there.

    Raises:
        UserError: they cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in (
            (KEY_FILE, material.key),
            (CERT_FILE, material.certificate),
            (CA_FILE, material.ca),
        ):
            part = directory / f".{name}.{os.getpid()}.part"
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            part.rename(directory / name)
    except OSError as error:
        raise UserError(f"the certificates cannot be written to {directory}: {error}") from error


def read(ca_file: str, cert_file: str = "", key_file: str = "") -> Material:
    """Reads and checks material.

    Args:
        ca_file: authorities that are trusted.
        cert_file: this process's certificate, with what leads to the authority; empty: none.
        key_file: its key.

    Raises:
        UserError: a file cannot be read or holds something else, a certificate is not valid now, or the three do not
            belong together.
    """
    material = Material(
        _bytes("security.ca_file", ca_file),
        _bytes("security.cert_file", cert_file) if cert_file else b"",
        _bytes("security.key_file", key_file) if key_file else b"",
    )
    _check_dates("security.ca_file", ca_file, material.ca)
    if bool(material.certificate) != bool(material.key):
        raise UserError(
            f"security.cert_file = {cert_file!r} and security.key_file = {key_file!r}: a certificate and its key "
            "are given together, or neither"
        )
    if material.certificate:
        _check_dates("security.cert_file", cert_file, material.certificate)
        _check_key(cert_file, key_file, material)
        _check_issuer(ca_file, cert_file, material)
    return material


def for_run(name: str, directory: Path, *, renew: bool = False) -> Material:
    """The material of a run: what lies in the directory, or new one where there is none.

    Args:
        name: of the run.
        directory: ``RUN_DIR/tls``.
        renew: also replaces what ends soon: for the start of a run alone, since its processes read these files once.

    Raises:
        UserError: it cannot be read or written.
    """
    files = [directory / file for file in (CA_FILE, CERT_FILE, KEY_FILE)]
    if all(file.is_file() for file in files):
        try:
            found = Material(*(file.read_bytes() for file in files))
            left = found.ends - datetime.datetime.now(datetime.UTC)
            if not renew or left > datetime.timedelta(days=DAYS) / 3:
                return read(*map(str, files))
        except (OSError, ValueError, UserError) as error:
            raise UserError(
                f"the run's certificates in {directory} cannot be used: {error}. Remove that directory, and the run "
                "makes new ones"
            ) from error
    made = make(name)
    write(made, directory)
    return made


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(begin).not_valid_after(end)


def _subject(name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _OURS),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(name: str, hosts: Sequence[str]) -> list[x509.GeneralName]:
    names: dict[str, x509.GeneralName] = {}
    for host in (name, socket.gethostname(), "localhost", "127.0.0.1", "::1", *hosts):
        try:
            names[host] = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            names[host] = x509.DNSName(host)
    return list(names.values())


def _bytes(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{key} = {path!r} cannot be read: {error}") from error


def _certificates(pem: bytes) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem)


def _check_dates(key: str, path: str, pem: bytes) -> None:
    try:
        certificates = _certificates(pem)
    except ValueError as error:
        raise UserError(f"{key} = {path!r} holds no certificate in PEM form: {error}") from error
    now = datetime.datetime.now(datetime.UTC)
    for one in certificates:
        begin, end = one.not_valid_before_utc, one.not_valid_after_utc
        if not begin <= now <= end:
            what = "is not valid yet" if now < begin else "has expired"
            raise UserError(
                f"{key} = {path!r}: the certificate of {one.subject.rfc4514_string()} {what} (valid from "
                f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC); make new ones with streamrl certs, or set the "
                "clock"
            )


def _check_key(cert_file: str, key_file: str, material: Material) -> None:
    try:
        key = serialization.load_pem_private_key(material.key, password=None)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"security.key_file = {key_file!r} holds no private key in PEM form without a password: {error}"
        ) from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != _certificates(material.certificate)[
        0
    ].public_key().public_bytes(*form):
        raise UserError(
            f"security.key_file = {key_file!r} is not the key of the first certificate in "
            f"security.cert_file = {cert_file!r}"
        )


def _check_issuer(ca_file: str, cert_file: str, material: Material) -> None:
    """Each certificate of the chain was signed by the next one, the last by one of the authorities."""
    chain, authorities = _certificates(material.certificate), _certificates(material.ca)
    for index, one in enumerate(chain):
        if not any(_signed(one, issuer) for issuer in (*chain[index + 1 : index + 2], *authorities)):
            raise UserError(
                f"security.cert_file = {cert_file!r} was not signed by an authority in security.ca_file = {ca_file!r}: "
                "they were made at different times, or for different runs"
            )


def _signed(one: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        one.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
