//! One cgroup per hierarchy for each bed, the root of all cgroups of its kubelet and containers. They cannot collide
//! with other beds or the machine, and are removed together. Supports version 1, version 2 and the hybrid mode.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

/// A mounted cgroup hierarchy, as `/proc/self/mountinfo` shows it.
#[derive(Debug, PartialEq)]
struct Hierarchy {
    mount: PathBuf,
    /// The directory of the hierarchy that is mounted there; `/` unless in a container.
    root: PathBuf,
    /// Controllers or `name=…` of version 1; `None` is version 2.
    v1: Option<String>,
}

/// The bed's cgroups, one path per hierarchy.
pub(super) struct Cgroups(Vec<(PathBuf, bool)>);

impl Cgroups {
    /// Creates them below this process's cgroup, so that its limits apply to the bed too. Version 2 allows no children
    /// with controllers next to processes, so there they are at the top.
    pub(super) fn create(name: &str) -> Result<Self, String> {
        let hierarchies = hierarchies(&read("/proc/self/mountinfo")?);
        let current = read("/proc/self/cgroup")?;
        if hierarchies.is_empty() {
            return Err("no cgroups are mounted".to_owned());
        }
        let mut made = Self(Vec::new());
        for hierarchy in &hierarchies {
            let dir = match &hierarchy.v1 {
                Some(controllers) => hierarchy.mount.join(below(&hierarchy.root, &own_path(&current, controllers))),
                None => hierarchy.mount.clone(),
            }
            .join(name);
            if let Err(error) = make(&dir, hierarchy) {
                made.remove();
                return Err(format!("cgroup {} cannot be made: {error}", dir.display()));
            }
            made.0.push((dir, hierarchy.v1.is_none()));
        }
        Ok(made)
    }

    /// Moves this process into them and makes them the root of its cgroup namespace.
    pub(super) fn join(&self) -> Result<()> {
        for (dir, _) in &self.0 {
            enter(dir)?;
        }
        unshare(CloneFlags::CLONE_NEWCGROUP).context("cannot make a cgroup namespace")?;
        for (dir, _) in self.0.iter().filter(|(_, v2)| *v2) {
            let leaf = dir.join("init");
            fs::create_dir(&leaf)?;
            enter(&leaf)?;
            for controller in fs::read_to_string(dir.join("cgroup.controllers"))?.split_whitespace() {
                fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}"))
                    .with_context(|| format!("cannot hand on the cgroup controller {controller}"))?;
            }
        }
        Ok(())
    }

    /// Removes them recursively; returns false while a process is still in one.
    pub(super) fn remove(&self) -> bool {
        self.0.iter().map(|(dir, _)| remove_tree(dir)).filter(Result::is_err).count() == 0
    }
}

/// Mounts only the bed's cgroups at the usual path, and a /sys for its own network namespace.
pub(super) fn mount_own() -> Result<()> {
    let hierarchies = hierarchies(&fs::read_to_string("/proc/self/mountinfo")?);
    mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>).context("cannot mount /sys")?;
    if hierarchies.iter().any(|h| h.v1.is_some()) {
        mount(Some("tmpfs"), "/sys/fs/cgroup", Some("tmpfs"), MsFlags::empty(), Some("mode=755"))?;
    }
    for Hierarchy { mount: at, v1, .. } in &hierarchies {
        fs::create_dir_all(at)?;
        let (kind, options) = match v1 {
            Some(controllers) if controllers.starts_with("name=") => ("cgroup", format!("none,{controllers}")),
            Some(controllers) => ("cgroup", controllers.clone()),
            None => ("cgroup2", String::new()),
        };
        mount(Some("cgroup"), at, Some(kind), MsFlags::empty(), Some(options.as_str()))
            .with_context(|| format!("cannot mount {}", at.display()))?;
    }
    Ok(())
}

fn read(path: &str) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{path} cannot be read: {error}"))
}

fn hierarchies(mountinfo: &str) -> Vec<Hierarchy> {
    let hierarchy = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<_> = left.split(' ').collect();
        let right: Vec<_> = right.split(' ').collect();
        let v1 = match *right.first()? {
            "cgroup" => {
                let own =
                    |option: &&str| !["rw", "ro", "xattr", "clone_children"].contains(option) && !option.contains('/');
                let (named, controllers): (Vec<&str>, Vec<&str>) =
                    right.get(2)?.split(',').filter(own).partition(|option| option.starts_with("name="));
                Some(if named.is_empty() { controllers } else { named }.join(","))
            }
            "cgroup2" => None,
            _ => return None,
        };
        Some(Hierarchy { mount: left.get(4)?.into(), root: left.get(3)?.into(), v1 })
    };
    mountinfo.lines().filter_map(hierarchy).collect()
}

/// The path of this process in the version 1 hierarchy of `controllers`, from `/proc/self/cgroup`.
fn own_path(cgroup: &str, controllers: &str) -> PathBuf {
    let path = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        (fields.next()? == controllers).then(|| fields.next().map(PathBuf::from))?
    };
    cgroup.lines().find_map(path).unwrap_or_default()
}

fn below(root: &Path, path: &Path) -> PathBuf {
    let path = path.strip_prefix(root).unwrap_or(path);
    path.strip_prefix("/").unwrap_or(path).to_owned()
}

fn make(dir: &Path, hierarchy: &Hierarchy) -> io::Result<()> {
    fs::create_dir(dir)?;
    // A new cpuset is empty, and no process can join an empty one.
    if hierarchy.v1.as_deref().is_some_and(|controllers| controllers.split(',').any(|c| c == "cpuset")) {
        for file in ["cpuset.cpus", "cpuset.mems"] {
            fs::write(dir.join(file), fs::read(dir.join("..").join(file))?)?;
        }
    }
    Ok(())
}

fn enter(dir: &Path) -> Result<()> {
    fs::write(dir.join("cgroup.procs"), "0").with_context(|| format!("cannot enter the cgroup {}", dir.display()))
}

fn remove_tree(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions_are_found() {
        let mountinfo = "\
            34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n\
            35 31 0:32 /docker/1f /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
            36 31 0:33 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/lib/x,name=systemd\n\
            37 31 0:34 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n\
            38 31 0:35 / /tmp rw - tmpfs tmpfs rw";
        let found = |mount: &str, root: &str, v1: Option<&str>| Hierarchy {
            mount: format!("/sys/fs/cgroup/{mount}").into(),
            root: root.into(),
            v1: v1.map(str::to_owned),
        };
        let expected = [
            found("cpuset", "/", Some("cpuset")),
            found("cpu,cpuacct", "/docker/1f", Some("cpu,cpuacct")),
            found("systemd", "/", Some("name=systemd")),
            found("unified", "/", None),
        ];
        assert_eq!(hierarchies(mountinfo), expected);
    }

    #[test]
    fn the_own_cgroup_is_seen_through_a_containers_mount() {
        let cgroup = "4:memory:/jobs/7\n2:cpu,cpuacct:/docker/1f/inner\n0::/";
        assert_eq!(below(Path::new("/"), &own_path(cgroup, "memory")), Path::new("jobs/7"));
        assert_eq!(below(Path::new("/docker/1f"), &own_path(cgroup, "cpu,cpuacct")), Path::new("inner"));
        assert_eq!(below(Path::new("/"), &own_path(cgroup, "pids")), Path::new(""));
    }
}
