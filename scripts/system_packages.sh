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
  # A word for each architecture that has the package.
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
# A source of packages that does not answer may have none of these.
$root apt-get update -qq || echo "Going on with the lists of packages that are here" >&2
# shellcheck disable=SC2086  # a list of words
$root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 \
  install -qq -y --no-install-recommends $missing
