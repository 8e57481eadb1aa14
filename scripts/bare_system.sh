#!/usr/bin/env bash
# Runs a command in a bare Debian or Ubuntu, as root:
#
#   scripts/bare_system.sh [OPTION]... SUITE ROOT COMMAND [ARGUMENT]...
#
#   -b HERE:THERE  the command finds the folder HERE at THERE, and cannot write to it
#   -w HERE:THERE  the same, and the command can write to it
#   -p PACKAGES    first installs these packages, one word as in "g++ make", and all updates
#   -t SITE        first makes /venv, with links to the PyTorch in the site-packages SITE
#
# SUITE is the codename of a release, as in bookworm or jammy. If ROOT does not exist, debootstrap
# makes it, with Python and certificates. ROOT keeps the command's changes. The mounts end with the
# command, which gets no variables of this environment except the proxies.
set -euo pipefail

if [ -z "${BARE_SYSTEM:-}" ]; then
  [ "$(id -u)" = 0 ] || { echo "$0: a bare system takes root" >&2; exit 1; }
  exec env BARE_SYSTEM=1 unshare --mount "$(realpath "$0")" "$@"
fi

binds=() packages="" site=""
while getopts b:w:p:t: option; do
  case $option in
    b) binds+=("ro:$OPTARG") ;;
    w) binds+=("rw:$OPTARG") ;;
    p) packages=$OPTARG ;;
    t) site=$OPTARG; binds+=("ro:$OPTARG:/opt/site") ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
suite=${1:?name a suite, as in bookworm} root=${2:?name a folder for the system}
shift 2
[ $# -gt 0 ] || { echo "$0: name a command" >&2; exit 2; }

CERTIFICATES=/etc/ssl/certs/ca-certificates.crt
variables=(HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
  PIP_CERT=$CERTIFICATES PIP_DISABLE_PIP_VERSION_CHECK=1)
for name in http_proxy https_proxy no_proxy; do
  [ -z "${!name:-}" ] || variables+=("$name=${!name}")
done

inside() {
  chroot "$root" /usr/bin/env -i "${variables[@]}" "$@"
}

copy_settings() {
  for name in /etc/hosts /etc/resolv.conf $CERTIFICATES; do
    [ ! -e "$name" ] || cp "$name" "$root$name"
  done
}

# Adds the archives of updates and security fixes to the one that debootstrap used.
add_updates() {
  local mirror components=main security
  mirror=$(find "$root/etc/apt" -path '*/sources.list*' -type f \
    -exec sed -nE 's/^deb (\[.*\] )?(http[^ ]*) .*/\2/p; s/^URIs: //p' {} + | head -n 1)
  security=$mirror
  case $mirror in
    *ubuntu*) components="main universe" ;;
    *) security=http://deb.debian.org/debian-security ;;
  esac
  rm -f "$root"/etc/apt/sources.list.d/*
  cat >"$root/etc/apt/sources.list" <<LINES
deb $mirror $suite $components
deb $mirror $suite-updates $components
deb $security $suite-security $components
LINES
}

if [ ! -e "$root" ]; then
  command -v debootstrap >/dev/null || { echo "$0: install debootstrap" >&2; exit 1; }
  mkdir -p "$(dirname "$root")"
  rm -rf "$root.part"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    "$suite" "$root.part" >&2
  mv "$root.part" "$root"
fi
found=$(. "$root/etc/os-release" && echo "${VERSION_CODENAME:-unknown}")
[ "$found" = "$suite" ] || { echo "$0: $root has $found, not $suite: name another" >&2; exit 1; }

mkdir -p "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -t sysfs sys "$root/sys"
mount -t tmpfs shm "$root/dev/shm"
for bind in "${binds[@]}"; do
  IFS=: read -r mode here there <<<"$bind"
  mkdir -p "$root$there"
  mount --bind -o "$mode" "$here" "$root$there"
done
copy_settings
if [ -n "$packages" ]; then
  add_updates
  inside apt-get -qq update >&2
  inside apt-get -qq -y dist-upgrade >&2
  # shellcheck disable=SC2086  # a list of words
  inside apt-get -qq -y install --no-install-recommends $packages >&2
  copy_settings  # an update of ca-certificates replaces the certificates
fi
if [ -n "$site" ] && [ ! -e "$root/venv" ]; then
  inside sh -euc '
    python3 -m venv /venv
    for name in torch torchgen functorch filelock fsspec jinja2 markupsafe mpmath networkx sympy \
      typing_extensions; do
      for path in /opt/site/$name /opt/site/$name-*.dist-info /opt/site/$name.py; do
        [ ! -e "$path" ] || ln -s "$path" /venv/lib/python3*/site-packages/
      done
    done'
fi
inside "$@"
