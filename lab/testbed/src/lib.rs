//! What the demo, the end-to-end tests and the benchmarks share: real machines that run the
//! self-checking guest.
//!
//! A [`TestVm`] is a QEMU with its monitor, console and RAM file, a [`MicroVm`] is one of our own;
//! an [`Observer`] times the guest from outside; and [`own_migration`] has QEMU migrate by itself,
//! for comparison. Keeps one promise: whatever way a test ends, no QEMU process, RAM file or
//! directory of it stays behind. Of Godwit it knows the command line only ([`Godwit`]), so that
//! what it reports about a migration is the word of a bystander.

#![forbid(unsafe_code)]

mod booted;
mod children;
mod clock;
mod conditions;
mod console;
mod cpu;
mod disk;
mod drain;
mod emulated_link;
mod gap;
mod godwit;
mod guest;
mod guest_ram;
mod huge;
mod image;
mod ip;
mod ksm;
mod kvm;
mod lan;
mod leftovers;
mod libvirt;
mod link;
mod machine;
mod memory_group;
mod microvm;
mod mount;
mod nats;
mod net_back_end;
mod netns;
mod network;
mod observer;
mod own;
mod own_disks;
mod pings;
mod ports;
mod previous;
mod progress_trace;
mod proxy;
mod qemu_build;
mod redis;
mod remote_disk;
mod saved;
mod skip;
mod slow_reads;
mod soak;
mod started;
mod storage_daemon;
mod talk;
mod throughput;
mod vm;
mod vm_config;
mod witness;

pub use children::{end_children, end_children_on_interrupt};
pub use clock::Clock;
pub use conditions::Conditions;
pub use console::{Beat, Console, longest_pause};
pub use cpu::{CpuTime, peak_rss};
pub use disk::{DiskImage, allocated, images_for};
pub use drain::drained;
pub use emulated_link::{EmulatedLink, LinkEnd};
pub use gap::{Gap, Observation};
pub use godwit::{Ended, Godwit, Running, shared_by};
pub use godwit_qemu::monitor::Qmp;
pub use guest::{GuestConfig, GuestFiles};
pub use guest_ram::GuestRam;
pub use huge::HugePages;
pub use image::{Boot, image_for};
pub use ip::tool;
pub use ksm::Ksm;
pub use kvm::{DISK_WORK, kvm_builds_for, kvm_builds_in_turn_for};
pub use lan::Lan;
pub use libvirt::{LibvirtGuest, LibvirtHost, QemuEvents, libvirt_for};
pub use link::Link;
pub use machine::Movable;
pub use memory_group::MemoryGroup;
pub use microvm::MicroVm;
pub use mount::{Frozen, Mount};
pub use nats::{Nats, nats_for};
pub use net_back_end::NetBackEnd;
pub use netns::{SlowLink, enter as enter_namespace};
pub use network::Network;
pub use observer::{BeaconPlace, Observer};
pub use own::{
    OwnMigration, OwnTerms, Style, own_migration, own_migration_under, own_migration_within,
    wall_clock,
};
pub use own_disks::{OwnDisksMigration, own_migration_with_disks};
pub use pings::{Heard, Pings, Silence};
pub use ports::Ports;
pub use previous::Previous;
pub use progress_trace::{Loss, ProgressTrace, WINDOW};
pub use proxy::{Harm, Proxy, Watch, Way};
pub use qemu_build::{QemuBuild, builds, builds_for, builds_in_turn_for, builds_since};
pub use redis::RedisClient;
pub use remote_disk::RemoteDisk;
pub use skip::{kvm_for, skip};
pub use slow_reads::SlowReads;
pub use soak::{at_most, soak};
pub use started::{Room, StartedVm};
pub use storage_daemon::{StorageDaemon, storage_daemon_for};
pub use talk::Talk;
pub use vm::TestVm;
pub use vm_config::{Accelerator, Backend, VmConfig};
pub use witness::Witness;
