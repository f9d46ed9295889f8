# What people type. `make` alone lists the targets.

CARGO ?= cargo

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: guest
guest: ## build the self-checking Linux guest: target/guest/vmlinuz and initramfs.cpio
	@$(CARGO) run --quiet --package xtask -- guest

.PHONY: qemu
qemu: ## install QEMU if missing; unpack QEMU 10 into target/qemu-10.0
	@$(CARGO) run --quiet --package xtask -- qemu

# `make bench-qemu BENCH_QEMU='--rounds 1'` for other figures; see the program's own usage line.
BENCH_QEMU ?= --rounds 5 --moves 50

.PHONY: bench-qemu
bench-qemu: ## compare with QEMU's own migration; fifty moves of a busy guest under QEMU 7.2
	@$(CARGO) build --quiet --release --workspace --bin godwit --bin qemu
	@$(CARGO) run --quiet --release --package godwit-bench --bin qemu -- $(BENCH_QEMU)
