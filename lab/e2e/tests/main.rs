//! What a user of the commands sees: real QEMUs, real guests, one program. Tests of one file stand
//! in the module of its name: `cargo test -p godwit-e2e --test e2e disks::`.
//!
//! One program, as each would have to be linked with all of the testbed, and as the longest test of
//! each would be waited for by itself. Only what changes the host for all of its processes (`ksm`)
//! or has daemons of its own (`libvirt`) has a program to itself.

mod audit;
mod back_ends;
mod bounds;
mod clocks;
mod coordinators;
mod cures;
mod differences;
mod direct_io;
mod disks;
mod dump;
mod elsewhere;
mod encrypted;
mod evacuate;
mod failures;
mod free_memory;
mod godwitd;
mod governor;
mod handover;
mod image;
mod killed;
mod kvm;
mod list;
mod metrics;
mod microvm;
mod moves;
mod no_threads;
mod ordinary;
mod outcomes;
mod package;
mod pings;
mod plan;
mod post_copy;
mod proxmox;
mod reconnect;
mod recover;
mod refusals;
mod report;
mod restart;
mod room;
mod soak;
mod start;
mod steering;
mod storage;
mod terminal;
mod upgrade;
mod versions;
