"""Throw-away certificates for mutual TLS."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Authority:
    """Signs certificates for loopback and one name."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    folder: Path

    @staticmethod
    def create(folder: Path) -> Authority:
        folder.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder("test authority", "test authority", key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        authority = Authority(key, builder.sign(key, hashes.SHA256()), folder)
        (folder / "ca.pem").write_bytes(authority.certificate.public_bytes(serialization.Encoding.PEM))
        return authority

    def issue(self, name: str, *, expired: bool = False) -> dict[str, str]:
        """Files of a certificate, as configuration keys."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _builder(name, "test authority", key, days=-1 if expired else 1).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        certificate = builder.sign(self.key, hashes.SHA256())
        (self.folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (self.folder / f"{name}.key").write_bytes(_pem(key))
        return {
            "tls_cert": str(self.folder / f"{name}.pem"),
            "tls_key": str(self.folder / f"{name}.key"),
            "tls_ca": str(self.folder / "ca.pem"),
        }


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: int = 1) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
