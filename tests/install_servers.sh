#!/usr/bin/env bash
# Installs etcd, nats-server, prometheus, openssl and chromium for the tests with apt, unless they are on the PATH.
set -euo pipefail
missing=()
command -v etcd >/dev/null || missing+=(etcd-server)
command -v nats-server >/dev/null || missing+=(nats-server)
command -v promtool >/dev/null || missing+=(prometheus)
command -v openssl >/dev/null || missing+=(openssl)
command -v chromium >/dev/null || missing+=(chromium)
[[ ${#missing[@]} -gt 0 ]] || exit 0
sudo=()
if [[ $(id -u) -ne 0 ]]; then
    if ! sudo -n true 2>/dev/null; then
        echo "error: the tests need ${missing[*]}; run: sudo apt-get install ${missing[*]}" >&2; exit 1
    fi
    sudo=(sudo -n)
fi
command -v apt-get >/dev/null || { echo "error: put etcd, nats-server and prometheus on the PATH (no apt-get here)" >&2; exit 1; }
# Keep the packages from starting servers on this machine.
policy=/usr/sbin/policy-rc.d
[[ -e $policy ]] || { printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee $policy >/dev/null; "${sudo[@]}" chmod +x $policy; trap '"${sudo[@]}" rm -f $policy' EXIT; }
"${sudo[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
