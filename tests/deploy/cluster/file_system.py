"""The file system of a pod: the image's places, the volumes, and nothing to write to but those."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.charts import ROOT
from tests.deploy.cluster.node import DNS_ADDRESS
from tests.deploy.cluster.pod_spec import PodSpec
from tests.deploy.cluster.secret_volume import SecretData, SecretVolume

# Where the image has its interpreter and what starts there (deploy/docker/Dockerfile).
VENV, HOME = "/opt/kvbraid/venv", "/home/kvbraid"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/sys")
_ETC = ("ld.so.cache", "passwd", "group", "localtime", "ssl", "alternatives")
_RUNTIME_SHM = "64m"


@dataclass(frozen=True)
class VolumeSources:
    """What stands behind volumes: files of ConfigMaps and Secrets, and folders for claims and host
    paths."""

    config_maps: dict[str, dict[str, str]]
    folders: dict[str, Path]
    secrets: dict[str, SecretData] = field(default_factory=dict)
    mounted_secrets: list[SecretVolume] = field(default_factory=list)

    def renew_secret(self, name: str, data: SecretData) -> None:
        """Change a Secret, in every pod that has it too."""
        self.secrets[name] = data
        for volume in self.mounted_secrets:
            if volume.secret_name == name:
                volume.write(data)


def setup_script(spec: PodSpec, pod_ip: str, sources: VolumeSources, folder: Path) -> str:
    """Shell lines that build it below folder/root, in a mount namespace of the pod.

    Raises KeyError for a volume that nothing stands behind.
    """
    root = folder / "root"
    root.mkdir(parents=True)
    files = folder / "etc"
    _write(files / "resolv.conf", _resolv_conf(spec.namespace))
    _write(files / "nsswitch.conf", "hosts: files dns\n")
    _write(files / "hosts", f"127.0.0.1 localhost\n{pod_ip} {spec.name}\n")
    lines = [f"echo {spec.name} > /proc/sys/kernel/hostname", _tmpfs(root, "755")]
    for place in _SYSTEM:
        lines += _bound(Path(place), root, place, read_only=True)
    lines += _bound(Path(sys.prefix), root, VENV, read_only=True)
    lines += [f"mkdir -p {root}/etc {root}/proc {root}/dev {root}{HOME}"]
    lines += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    lines += [_tmpfs(f"{root}/dev/shm", "1777", f",size={_RUNTIME_SHM}")]
    lines += [f"cp -r /etc/{name} {root}/etc/ 2>/dev/null || true" for name in _ETC]
    lines += [f"cp {files}/* {root}/etc/"]
    for mount in spec.container["volumeMounts"]:
        lines += _volume(spec, mount, sources, root, folder)
    # Last: a checkout may lie below /tmp, which is a volume.
    for place in [*_interpreter(), str(ROOT)]:
        lines += _bound(Path(place), root, place, read_only=True)
    if spec.container["securityContext"]["readOnlyRootFilesystem"]:
        lines.append(f"mount -o remount,ro {root}")
    return "\n".join(lines)


def _interpreter() -> list[str]:
    """The Python that the virtual environment stands on, unless it is the system's."""
    return [] if sys.base_prefix.startswith("/usr") else [sys.base_prefix]


def _resolv_conf(namespace: str) -> str:
    zone = "svc.cluster.local"
    search = f"{namespace}.{zone} {zone} cluster.local"
    return f"nameserver {DNS_ADDRESS}\nsearch {search}\noptions ndots:5\n"


def _volume(
    spec: PodSpec, mount: dict[str, Any], sources: VolumeSources, root: Path, folder: Path
) -> list[str]:
    (volume,) = (v for v in spec.spec["volumes"] if v["name"] == mount["name"])
    target, read_only = mount["mountPath"], mount.get("readOnly", False)
    if "emptyDir" in volume:
        medium = volume["emptyDir"].get("sizeLimit")
        # As a kubelet does it: owned by the pod's group, open to all.
        size = f",size={medium.removesuffix('i').lower()}" if medium else ""
        return [f"mkdir -p {root}{target}", _tmpfs(f"{root}{target}", "1777", size)]
    if "configMap" in volume:
        source = folder / mount["name"]
        for name, text in sources.config_maps[volume["configMap"]["name"]].items():
            _write(source / name, text)
    elif "secret" in volume:
        source = folder / mount["name"]
        secret = SecretVolume(volume, spec.spec["securityContext"]["fsGroup"], source)
        secret.write(sources.secrets[secret.secret_name])
        sources.mounted_secrets.append(secret)
    elif "persistentVolumeClaim" in volume:
        source = sources.folders[volume["persistentVolumeClaim"]["claimName"]]
    else:
        source = sources.folders[volume["hostPath"]["path"]]
    return _bound(source, root, target, read_only=read_only)


def _tmpfs(target: Path | str, mode: str, more: str = "") -> str:
    return f"mount -t tmpfs -o mode={mode}{more} tmpfs {target}"


def _bound(source: Path, root: Path, target: str, *, read_only: bool) -> list[str]:
    if not source.exists():
        return []
    at = shlex.quote(f"{root}{target}")
    lines = [f"mkdir -p {at}", f"mount --bind {shlex.quote(str(source))} {at}"]
    return [*lines, f"mount -o remount,bind,ro {at}"] if read_only else lines


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.parent.chmod(0o755)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
