# Everything that there is to do is listed by `make help`. As root, demo and test install what is missing from Debian's
# packages; otherwise they say what to install.

SHELL := /bin/bash
ARGS ?=
BUF := go tool -modfile=tools.mod buf

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build all commands into bin/
	CGO_ENABLED=0 go build -trimpath -o bin/ ./cmd/...

.PHONY: demo
demo: build ## Watch a filesystem being made, mounted, measured and grown in a microVM (ARGS=-json for machines)
	@go run ./test/setup
	@go build -o bin/ ./test/demo && exec bin/demo -bin bin $(ARGS)

.PHONY: test
test: build lint verify ## Check and test everything, VMs included
	@go run ./test/setup -test
	CRUST_REQUIRE=$${CRUST_REQUIRE-$$([ $$(id -u) = 0 ] && echo root,vm)} go test -race -shuffle=on -timeout 60m ./...

.PHONY: cluster
cluster: ## Run a one-node Kubernetes with this storage on loopback, until Ctrl-C (the first time it builds for long)
	@CGO_ENABLED=0 go run -trimpath ./test/setup -cluster
	@mkdir -p bin && CGO_ENABLED=0 go build -trimpath -o bin/ ./test/e2e/cluster/up && exec bin/up

.PHONY: e2e
e2e: ## Test pods in microVMs: by containerd's CRI, and in the one-node Kubernetes (ARGS="-test.run TestDeployed")
	@CGO_ENABLED=0 go run -trimpath ./test/setup -cluster
	@mkdir -p bin && CGO_ENABLED=0 GOGC=400 go test -trimpath -c -o bin/e2e.test ./test/e2e/cluster
	cd test/e2e/cluster && CRUST_REQUIRE=root,vm,cluster ../../../bin/e2e.test -test.v -test.timeout 90m $(ARGS)

.PHONY: bench
bench: build ## Measure, side by side with the alternatives
	@go run ./test/setup -test
	go test -run '^$$' -bench . -benchtime 1s ./...

.PHONY: lint
lint: ## gofmt, go vet, staticcheck
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$unformatted" ] || { echo "not formatted (gofmt -w): $$unformatted"; exit 1; }
	go vet ./...
	go tool staticcheck ./...

.PHONY: generate
generate: ## Generate code from the .proto files
	$(BUF) lint
	$(BUF) generate

.PHONY: images
images: ## Build container images for amd64 and arm64 into bin/images (ARGS="--name registry.example.com/crust-node:1")
	go run ./deploy/images -o bin/images $(ARGS)

.PHONY: manifests
manifests: ## Render the plain manifests from the Helm chart
	go run ./deploy/render

.PHONY: verify
verify: generate ## Fail if generated code or go.mod is not what is committed
	@go mod tidy -diff
	@git diff --exit-code -- protocol || { echo "generated code differs: commit the result of make generate"; exit 1; }
