#!/usr/bin/env bash
# Streams an answer, kills the decode worker under it (SIGKILL), and compares the text with an undisturbed answer.
#   PREFILL_WORKERS=2 DECODE_WORKERS=2 make up      # in another terminal of this machine
#   examples/kill_a_worker.sh ["a prompt"]
# Environment variables: HTTP_PORT or BATON_URL, as of the stack; KEY, an API key marked admin, if the stack has keys.
set -euo pipefail

URL=${BATON_URL:-http://127.0.0.1:${HTTP_PORT:-8000}}
PROMPT=${1:-Tell me a long story about a river.}
ID=kill-a-worker-$$-$(date +%s)
TMP=$(mktemp -d)
trap 'rm -rf "$TMP"' EXIT

fail() { echo "error: $*" >&2; exit 1; }

call() { curl -sSN --noproxy '*' ${KEY:+-H "Authorization: Bearer $KEY"} "$@" 2>"$TMP/why"; }

get() { # get PATH CODE: runs this Python code on the JSON `d` at the path; fails without it
    call --fail --max-time 10 "$URL$1" | PROMPT=$PROMPT python3 -c "import json, os, sys
d = json.load(sys.stdin)
$2" 2>>"$TMP/why"
}

stream() { # stream ID: sends the request and prints the text as it comes, the reasoning first
    call --max-time 300 "$URL/v1/chat/completions" -H 'Content-Type: application/json' -H "X-Request-Id: $1" -d "$BODY" |
        python3 -uc '
import json, sys
is_answer = False
for line in sys.stdin:
    if line.startswith(("{", "data: {")):
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            sys.exit("error: " + event["error"]["message"])
        for choice in event["choices"]:
            thought, text = (choice["delta"].get(name) or "" for name in ("reasoning_content", "content"))
            print(thought + ("\n" if text and not is_answer else "") + text, end="")
            is_answer = is_answer or bool(text)
print()'
}

workers=$(get /fleet 'for w in d["workers"]:
    if (w["role"], w["state"]) == ("decode", "ready"):
        print(w["worker_id"], w["name"] or w["worker_id"], w["pid"], w["host"])') ||
    fail "no Baton shows its workers at $URL/fleet ($(head -n 1 "$TMP/why")); start: PREFILL_WORKERS=2 DECODE_WORKERS=2 make up"
num=$(grep -c . <<<"$workers") || true
((num >= 2)) || fail "$num of the two decode workers that this takes is ready; start: PREFILL_WORKERS=2 DECODE_WORKERS=2 make up"
while read -r _ name pid host; do
    grep -qs workers "/proc/$pid/cmdline" || fail "$name runs on $host, and its process $pid cannot be killed from here"
done <<<"$workers"
get "/requests?running=1" "" || fail "$URL/requests: $(head -n 1 "$TMP/why"); if the stack has API keys, set KEY to one marked admin"
BODY=$(get /fleet 'print(json.dumps({"model": d["models"][0], "temperature": 0, "max_tokens": 400, "stream": True,
    "messages": [{"role": "user", "content": os.environ["PROMPT"]}]}))')

echo "1. An undisturbed answer:"
stream "$ID-undisturbed" | tee "$TMP/undisturbed"

echo "2. The same request; its decode worker is killed while it answers:"
stream "$ID" > >(tee "$TMP/killed") &
answer=$!
ATTEMPTS='d["requests"][0]["record"]["legs"][0]["attempts"]'
worker=""
until [[ -n $worker ]] && (($(wc -c <"$TMP/killed") > 20)); do
    kill -0 "$answer" 2>/dev/null || fail "the answer ended before its worker was found; try a prompt with a longer answer"
    # Without Python, whose start may take as long as the answer.
    worker=$(call --fail --max-time 10 "$URL/requests?id=$ID" | grep -oE '"decode": *"[^"]+"' | tail -n 1 | cut -d '"' -f 4) ||
        sleep 0.05
done
read -r _ name pid _ < <(grep -wF -- "$worker" <<<"$workers")
kill -KILL "$pid" || fail "cannot kill $name, process $pid"
echo; echo "   -- killed $name, process $pid --"
wait "$answer" || fail "the stream broke; see: python -m baton why $ID"

attempts=$(get "/requests?id=$ID" "print(*(a['decode'] + ': ' + a.get('outcome', 'answered') for a in $ATTEMPTS), sep=', ')")
[[ $attempts == *,* ]] || fail "the answer had ended before $name was killed; try again, or a prompt with a longer answer"
cmp "$TMP/undisturbed" "$TMP/killed" || fail "the texts differ; attempts: $attempts"
echo "The text is whole: its $(wc -m <"$TMP/killed") characters equal the undisturbed answer. Attempts: $attempts."
echo "More: .venv/bin/python -m baton why $ID${BATON_URL:+ --url $BATON_URL}"
