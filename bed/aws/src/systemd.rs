//! What machines have of systemd: `systemctl` enables a unit and starts it, and a reboot starts what is enabled.

use std::{fs, io, path::Path};

use paddock_bed_process::write_program;

/// A machine with systemd has `/run/systemd/system` (`sd_booted(3)`).
pub fn install(root: &Path, bin: &Path) -> io::Result<()> {
    for dir in ["run/systemd/system", "etc/systemd/system/multi-user.target.wants"] {
        fs::create_dir_all(root.join(dir))?;
    }
    write_program(&bin.join("systemctl"), SYSTEMCTL)
}

/// Every unit is one that `multi-user.target` wants, and is started again when it ends.
const SYSTEMCTL: &str = r#"#!/bin/sh
units="$PADDOCK_ROOT/etc/systemd/system"
for unit; do :; done
case $1 in
enable) ln -s "../$unit" "$units/multi-user.target.wants/$unit" ;;
start)
    command="$(sed -n 's/^ExecStart=//p' "$units/$unit")"
    setsid sh -c "while :; do $command; sleep 1; done" >>"$PADDOCK_ROOT/var/log/$unit.log" 2>&1 &
    ;;
esac
"#;

/// The first process after a reboot. cloud-init does not run the user data again.
pub const INIT: &str = r#"for unit in "$PADDOCK_ROOT"/etc/systemd/system/multi-user.target.wants/*; do
    [ ! -e "$unit" ] || systemctl start "${unit##*/}"
done
while :; do sleep 3600; done"#;
