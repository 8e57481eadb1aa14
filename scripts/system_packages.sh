#!/bin/sh
# Installs the missing ones among the Debian packages named as arguments, as root or by passwordless
# sudo. Without these rights it prints the command that installs them, and fails.
set -eu

if ! command -v dpkg-query >/dev/null; then
  echo "This system has no dpkg, so nothing was checked; install the equivalents of: $*" >&2
  exit 0
fi

missing=""
for package in "$@"; do
  # One word per architecture of the package.
  states=$(dpkg-query -W -f '${db:Status-Status} ' "$package" 2>/dev/null) || states=absent
  case " $states" in
    *" installed "*) ;;
    *) missing="$missing $package" ;;
  esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
  root=""
elif sudo -n true 2>/dev/null; then
  root=sudo
else
  echo "Missing system packages; install them by: sudo apt-get install$missing" >&2
  exit 1
fi
# An unreachable source may have none of these packages, so its failure is no error.
$root apt-get update -qq || echo "apt-get update failed; using the present package lists" >&2
# shellcheck disable=SC2086  # a list of words
$root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 \
  install -qq -y --no-install-recommends $missing
