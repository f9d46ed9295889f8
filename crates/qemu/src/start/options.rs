//! What becomes of each of QEMU's options (qemu-options.hx of QEMU 7.2 to 11.1).

use super::values::Kind;

/// What becomes of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It has no value, and is carried.
    Flag,
    /// It is carried as it is: its value has no path.
    Text,
    /// It is carried, and its value is a path: of what must be there.
    File,
    /// The same, of what QEMU makes.
    Made,
    /// It is carried, and its value is looked through.
    Looked(Kind),
    /// It is carried, if the operator has named this very file: it decides what QEMU does.
    Settings,
    /// It is left out: godwit has its own, or it is nothing of the guest's.
    LeftOut,
    /// It is refused, for this reason.
    Refused(&'static str),
}

const BY_HAND: &str = "start the destination by hand (godwit receive --vm)";
const ITS_USER: &str = "run godwit receive as the user that QEMU is to have, and start the \
             destination by hand (godwit receive --vm)";

/// What becomes of the option `name`; `None` where it is not known.
pub(super) fn fate(name: &str) -> Option<Fate> {
    use Fate::{File, Flag, LeftOut, Looked, Made, Refused, Settings, Text};
    Some(match name {
        "enable-kvm" | "full-screen" | "mem-prealloc" | "no-acpi" | "no-fd-bootchk" | "no-hpet"
        | "no-reboot" | "no-shutdown" | "no-user-config" | "nodefaults" | "nographic"
        | "only-migratable" | "usb" | "win2k-hack" => Flag,
        "action" | "append" | "compat" | "cpu" | "echr" | "id" | "k" | "m" | "msg" | "name"
        | "numa" | "overcommit" | "rtc" | "sandbox" | "smp" | "uuid" | "vga" | "watchdog"
        | "watchdog-action" => Text,
        "" | "bios" | "cdrom" | "dtb" | "fda" | "fdb" | "hda" | "hdb" | "hdc" | "hdd"
        | "initrd" | "kernel" | "mtdblock" | "option-rom" | "pflash" | "sd" => File,
        "mem-path" | "pidfile" => Made,
        "machine" | "M" => Looked(Kind::Machine),
        "drive" | "blockdev" => Looked(Kind::Disk),
        "device" => Looked(Kind::Device),
        "object" => Looked(Kind::Object),
        "netdev" | "nic" | "net" => Looked(Kind::Network),
        "chardev" => Looked(Kind::Chardev),
        "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" | "debugcon" => {
            Looked(Kind::Console)
        }
        "mon" | "accel" | "global" => Looked(Kind::Other),
        "vnc" | "display" | "spice" | "boot" | "smbios" | "fw_cfg" | "audiodev" | "audio"
        | "icount" => Looked(Kind::Other),
        "D"
        | "L"
        | "S"
        | "d"
        | "daemonize"
        | "dfilter"
        | "enable-sync-profile"
        | "incoming"
        | "jitdump"
        | "perfmap"
        | "preconfig"
        | "trace" => LeftOut,
        "s" | "gdb" => Refused("a debugger may be at work: end it, and start the VM without"),
        "snapshot" => Refused(
            "what the guest has written is in temporary files that nobody moves: commit it (HMP \
             commit all), and start the VM without -snapshot",
        ),
        "loadvm" => Refused(
            "the image's saved state is not the guest's any more; start the \
             destination by hand (godwit receive --vm)",
        ),
        "add-fd" => Refused(
            "descriptors were handed over by whoever started it: have that \
             program start the destination (godwit receive --vm)",
        ),
        "chroot" | "run-with" | "runas" => Refused(ITS_USER),
        "readconfig" => Settings,
        "plugin" => Refused(
            "it is code that would run here: start the destination by hand \
             (godwit receive --vm)",
        ),
        "fsdev" | "virtfs" => Refused(
            "QEMU cannot migrate a guest that has a directory of the \
             host's mounted: unmount it and start the VM without",
        ),
        "tpmdev" => Refused(
            "what the TPM has stored is not moved: start the destination by hand \
             (godwit receive --vm)",
        ),
        "acpitable" => Refused(
            "its tables are in files of its host: start the destination by hand (godwit receive \
             --vm)",
        ),
        "iscsi" | "set" | "usbdevice" | "semihosting-config" | "prom-env" | "seed" => {
            Refused(BY_HAND)
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_code_or_changes_the_user_is_refused() {
        for name in ["chroot", "runas", "plugin", "add-fd", "snapshot", "set"] {
            assert!(matches!(fate(name), Some(Fate::Refused(_))), "{name}");
        }
        for name in ["daemonize", "incoming", "D", "S", "L"] {
            assert_eq!(fate(name), Some(Fate::LeftOut), "{name}");
        }
        assert_eq!((fate("m"), fate("unheard-of")), (Some(Fate::Text), None));
    }
}
