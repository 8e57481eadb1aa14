#!/bin/sh
# Installs the Debian packages named as arguments that are missing, as root or by passwordless sudo.
# When it may not, it prints one line that says what to install, and fails.
set -eu

if ! command -v dpkg-query >/dev/null; then
  echo "This system has no dpkg, so nothing was checked; install the equivalents of: $*" >&2
  exit 0
fi

missing=""
for package in "$@"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=absent
  [ "$status" = installed ] || missing="$missing $package"
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
$root apt-get update -qq
# shellcheck disable=SC2086  # a list of words
$root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing
