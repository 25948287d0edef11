#!/usr/bin/env bash
# Talks with a cluster (`make serve`) through curl. TANDEM_URL and TANDEM_API_KEY say where and as whom.
set -euo pipefail
url=${TANDEM_URL:-http://127.0.0.1:8000}
request() { curl --silent --show-error --fail-with-body -H "Authorization: Bearer ${TANDEM_API_KEY:-none}" "$@"; }

echo "Ready?"
request "$url/ready"; echo

echo "Models:"
request "$url/v1/models"; echo

echo "A chat completion:"
request "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "temperature": 0, "max_tokens": 32
}'; echo

echo "The same, streamed:"
request --no-buffer "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "temperature": 0, "max_tokens": 32, "stream": true, "stream_options": {"include_usage": true}
}'

echo "What the router counts (first lines):"
request "$url/metrics" | awk '!/^#/ && ++n <= 5'
