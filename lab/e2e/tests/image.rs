//! What `make image` makes: it boots, stamps, and is moved, by QEMU itself and by godwit.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use godwit_e2e::LIMIT;
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Boot, DiskImage, Godwit, GuestConfig, Style, TestVm, VmConfig, builds, image_for, images_for,
    own_migration, skip,
};
use godwit_units::ByteCount;
use serde_json::{Value, json};

/// Firmware, menu, kernel, drivers and the first stamps, all under emulation.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
const DISK: ByteCount = ByteCount(8 << 20);

/// The machine that boots `boot`, in the newest QEMU; `None` where there is none, which is said.
fn config(boot: Boot, test: &str) -> Option<VmConfig> {
    if !image_for(&boot, test) {
        return None;
    }
    // Guests under TCG were seen to crash behind an older QEMU's own migration.
    let newest = builds().into_iter().filter(|build| build.version.0 >= 8);
    let Some(build) = newest.max_by_key(|build| build.version) else {
        skip(test, "there is no QEMU 8 or newer: run `make qemu`");
        return None;
    };
    let guest = GuestConfig { memory: ByteCount(384 << 20), ..GuestConfig::small(Mode::Idle) };
    Some(VmConfig::new(&build, guest).with_boot(boot))
}

/// Waits for two lines that tell of work done and nothing found.
fn await_work(vm: &TestVm) {
    let clean = |line: &str| line.starts_with("written ") && line.contains(", bugs 0,");
    let seen = vm.console_lines().len();
    vm.wait_for_lines("line of work without bugs", (seen, 2), LIMIT, clean).unwrap();
}

/// Boots `config`, moves it by QEMU's own migration and then by godwit; all lines it has printed,
/// and where it is.
fn boot_and_move_twice(config: &VmConfig) -> (Vec<String>, TestVm) {
    let mut first = TestVm::source(config).unwrap();
    let stamped = |line: &str| line.starts_with("stamped ");
    let told = first.wait_for_lines("stamped memory", (0, 1), BOOT_LIMIT, stamped).unwrap();
    println!("{}: {}", config.build, told[0]);
    await_work(&first);

    let mut second = TestVm::destination(config).unwrap();
    own_migration(&mut first, &mut second, Style::Plain, LIMIT).unwrap();
    await_work(&second);

    let third = TestVm::destination(config).unwrap();
    let godwit = Godwit::built().unwrap();
    let (receive, address) = godwit.receive(&third, &[]).unwrap();
    let migrate = godwit.migrate(&second, &address, &["--verify"]).unwrap();
    let (migrated, received) = (migrate.wait(LIMIT).unwrap(), receive.wait(LIMIT).unwrap());
    assert_eq!(migrated.last()["outcome"], "migrated", "{} {}", migrated.errors, received.errors);
    await_work(&third);

    let vms = [first, second, third];
    let bugs: Vec<_> = vms.iter().flat_map(TestVm::bugs).collect();
    assert_eq!(bugs, [""; 0]);
    let lines = vms.iter().flat_map(TestVm::console_lines).collect();
    let [_, _, third] = vms;
    (lines, third)
}

#[test]
fn kernel_and_initramfs_run_what_the_command_line_says_and_are_moved() {
    let boot = Boot::Image("--memory 64MiB --size 4KiB,64KiB --report 1s".to_owned());
    let test = "kernel_and_initramfs_run_what_the_command_line_says_and_are_moved";
    let Some(config) = config(boot, test) else { return };
    let (lines, _) = boot_and_move_twice(&config);
    assert!(lines.iter().any(|line| line.starts_with("stamped 64MiB in 1 places")), "{lines:?}");
}

/// The ISO does what its menu begins with, and is moved.
fn the_iso_boots_by_itself(uefi: bool, test: &str) {
    let Some(config) = config(Boot::Iso { uefi }, test) else { return };
    let (lines, _) = boot_and_move_twice(&config);
    assert!(lines.iter().any(|line| line.contains("--rate 25MiB/s --memory")), "{lines:?}");
}

#[test]
fn the_iso_boots_by_itself_with_bios_and_is_moved() {
    the_iso_boots_by_itself(false, "the_iso_boots_by_itself_with_bios_and_is_moved");
}

#[test]
fn the_iso_boots_by_itself_with_uefi_and_is_moved() {
    the_iso_boots_by_itself(true, "the_iso_boots_by_itself_with_uefi_and_is_moved");
}

/// A disk is written when it is named, and only then.
#[test]
fn the_image_overwrites_no_disk_that_is_not_named() {
    let test = "the_image_overwrites_no_disk_that_is_not_named";
    for (named, overwritten) in [("", false), (" --destroy-data /dev/vda --direct", true)] {
        let boot = Boot::Image(format!("--memory 16MiB --report 1s{named}"));
        let Some(config) = config(boot, test) else { return };
        if !images_for(test) {
            return;
        }
        let disk = DiskImage::create("raw", DISK).unwrap();
        let vm = TestVm::source(&config.with_disk("disk0", &disk)).unwrap();
        let clean = |line: &str| line.starts_with("written ");
        vm.wait_for_lines("line of work", (0, 2), BOOT_LIMIT, clean).unwrap();
        assert_eq!(vm.bugs(), [""; 0]);
        let bytes = std::fs::read(disk.path()).unwrap();
        assert_eq!(bytes.iter().any(|byte| *byte != 0), overwritten, "{named}");
    }
}

/// What `godwit-stamp check` of this host finds on `disk`, and its exit code.
fn checked(disk: &DiskImage) -> (Option<i32>, Value) {
    let stamp = Godwit::built().unwrap().beside("godwit-stamp");
    let path = disk.path().display().to_string();
    let output = stamp.run(&["check", &path, "--json"]).unwrap();
    let told = serde_json::from_slice(&output.stdout);
    (
        output.status.code(),
        told.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr))),
    )
}

#[test]
fn a_disk_that_is_stamped_while_it_is_moved_is_whole_and_a_flipped_bit_is_found() {
    let test = "a_disk_that_is_stamped_while_it_is_moved_is_whole_and_a_flipped_bit_is_found";
    let work = "--memory 16MiB --report 1s --rate 10MiB/s --destroy-data /dev/vda --direct";
    let Some(config) = config(Boot::Image(work.to_owned()), test) else { return };
    if !images_for(test) {
        return;
    }
    let disk = DiskImage::create("raw", DISK).unwrap();
    let (_, mut vm) = boot_and_move_twice(&config.with_disk("disk0", &disk));
    // What is under way ends first.
    vm.pause().unwrap();
    drop(vm);
    let (code, found) = checked(&disk);
    assert_eq!((code, &found["bugs"]), (Some(0), &json!(0)), "{found}");
    assert_eq!(found["checked_bytes"], DISK.0, "{found}");

    let file = File::options().read(true).write(true).open(disk.path()).unwrap();
    // In the bytes that follow from the head of sector 30.
    let (at, mut byte) = (30 * 512 + 322, [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 2], at).unwrap();
    let (code, found) = checked(&disk);
    assert_eq!((code, &found["bugs"]), (Some(3), &json!(1)), "{found}");
    let finding = &found["findings"][0];
    assert_eq!((&finding["kind"], &finding["sector"]), (&json!("flipped bits"), &json!(30)));
}
