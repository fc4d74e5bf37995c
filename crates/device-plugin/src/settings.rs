//! Settings of `paddock device-plugin`: flags, each also an environment variable.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use crate::board::{from_device_tree, is_label_value};

/// The kubelet's default pod limit; more slots could not be used.
const SLOTS_MAX: i64 = 110;

#[derive(Args, Debug, Clone)]
pub struct Settings {
    /// How many runner pods the board takes at a time.
    #[arg(
        long,
        env = "PADDOCK_SLOTS",
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=SLOTS_MAX)
    )]
    pub slots: u32,

    /// The extended resource that counts the slots: `resourceName` of the pools that this board serves.
    #[arg(
        long,
        env = "PADDOCK_RESOURCE_NAME",
        value_name = "DOMAIN/NAME",
        default_value = "riseproject.com/runner",
        value_parser = resource_name
    )]
    pub resource_name: String,

    /// What board this is, for the label `riseproject.dev/board`; from the device tree when left out.
    #[arg(long, env = "PADDOCK_BOARD", value_name = "BOARD", value_parser = board)]
    pub board: Option<String>,

    /// Where the kernel shows the device tree. Container runtimes hide it: mount it, and say where.
    #[arg(long, env = "PADDOCK_DEVICE_TREE", value_name = "DIRECTORY", default_value = "/proc/device-tree")]
    pub device_tree: PathBuf,

    /// The node that this is, by its name in Kubernetes.
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: String,

    /// Where the kubelet has its socket for device plugins.
    #[arg(
        long,
        env = "PADDOCK_PLUGIN_DIR",
        value_name = "DIRECTORY",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    pub plugin_dir: PathBuf,
}

impl Settings {
    /// The configured board, or the one from the device tree.
    pub fn board(&self) -> Result<String> {
        if let Some(board) = &self.board {
            return Ok(board.clone());
        }
        let property = |name: &str| fs::read(self.device_tree.join(name)).unwrap_or_default();
        from_device_tree(&property("compatible"), &property("model")).with_context(|| {
            let tree = self.device_tree.display();
            format!("which board is this? Neither {tree}/compatible nor {tree}/model says it: give --board")
        })
    }
}

fn board(text: &str) -> Result<String, String> {
    if is_label_value(text) {
        Ok(text.to_owned())
    } else {
        Err("a label value: 1 to 63 of a-z, A-Z, 0-9 and inner dots, dashes and underscores".into())
    }
}

/// Validates an extended resource name as Kubernetes does: a domain outside `kubernetes.io`, and a name.
fn resource_name(text: &str) -> Result<String, String> {
    let is_domain = |domain: &str| {
        let own = domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io");
        let part = |part: &str| is_label_value(part) && !part.contains(['_', '.']) && part == part.to_lowercase();
        own && domain.len() <= 253 && domain.split('.').all(part)
    };
    match text.split_once('/') {
        Some((domain, name)) if is_domain(domain) && is_label_value(name) => Ok(text.to_owned()),
        _ => Err("an extended resource, such as example.com/runner".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extended_resource_has_a_domain_of_its_own_and_a_name() {
        for good in ["riseproject.com/runner", "example/runner_2", "paddock.test/test-1"] {
            assert_eq!(resource_name(good).as_deref(), Ok(good));
        }
        for bad in
            ["", "runner", "/runner", "a.com/", "a.com/b/c", "a b/c", "kubernetes.io/x", "x.kubernetes.io/y", "A/b"]
        {
            assert!(resource_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_board_comes_from_the_flag_or_the_device_tree() {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            settings: Settings,
        }
        let dir = tempfile::tempdir().unwrap();
        let board = |more: &[&str]| {
            let tree = format!("--device-tree={}", dir.path().display());
            let all = [&["test", "--node-name=one", &tree], more].concat();
            <Cli as clap::Parser>::try_parse_from(all).unwrap().settings.board()
        };
        let error = board(&[]).unwrap_err().to_string();
        assert!(error.contains("/compatible") && error.contains("--board"), "{error}");
        fs::write(dir.path().join("model"), "Milk-V Jupiter\0").unwrap();
        assert_eq!(board(&[]).unwrap(), "milk-v-jupiter");
        fs::write(dir.path().join("compatible"), "milkv,jupiter\0spacemit,k1-x\0").unwrap();
        assert_eq!(board(&[]).unwrap(), "milkv-jupiter");
        assert_eq!(board(&["--board=scw-em-rv1"]).unwrap(), "scw-em-rv1");
    }

    #[test]
    fn a_board_is_a_label_value() {
        assert!(board("scw-em-rv1").is_ok());
        for bad in ["", "-a", "a-", "a,b", "two words", &"x".repeat(64)] {
            assert!(board(bad).is_err(), "{bad}");
        }
    }
}
