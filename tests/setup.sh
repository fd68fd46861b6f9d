#!/bin/sh
# Installs the programs that the tests start, from the distribution's packages. Does nothing when all are there.
# Debian and its derivatives; needs root to install.
set -eu

missing=
need() {
	PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need qemu-system-x86_64 qemu-system-x86
need valgrind valgrind
need nvme nvme-cli
need mke2fs e2fsprogs
need fio fio
need openssl openssl
need python3 python3
python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
need xz xz-utils
need ip iproute2
need nsenter util-linux
# The guest's shell must not need libraries, so another build of the same program will not do.
dpkg-query -W -f '${Status}' busybox-static 2>/dev/null | grep -q 'ok installed' ||
	missing="$missing busybox-static"

# The guest's kernel is downloaded on first use, which needs the package lists.
lists() {
	apt-cache show --no-all-versions linux-image-amd64 >/dev/null 2>&1
}

if [ -n "$missing" ] || ! lists; then
	apt-get update -qq
fi
if [ -n "$missing" ]; then
	# shellcheck disable=SC2086  # a list of words
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi
