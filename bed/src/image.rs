//! Builds reproducible single-layer container images without a container engine.
//!
//! The archive is an OCI layout with an additional Docker manifest, so containerd, skopeo and `docker load` accept it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::process::tool;

/// The user of our images: not root, and unused on the host.
const USER: u32 = 65532;
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The busybox applets in test images.
const APPLETS: [&str; 24] = [
    "cat", "chmod", "cp", "date", "echo", "env", "false", "grep", "head", "hostname", "id", "kill", "ls", "mkdir",
    "nc", "printf", "ps", "rm", "sh", "sleep", "tail", "touch", "true", "wget",
];

pub struct Image {
    reference: String,
    files: BTreeMap<PathBuf, Entry>,
    user: String,
    entrypoint: Vec<String>,
    labels: BTreeMap<String, String>,
}

enum Entry {
    Directory { mode: u32 },
    File { content: Content, mode: u32 },
    Link(PathBuf),
}

/// The content of a file.
pub enum Content {
    Bytes(Vec<u8>),
    /// Read from the host when the image is written.
    Host(PathBuf),
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Bytes(text.into())
    }
}

impl From<&Path> for Content {
    fn from(path: &Path) -> Self {
        Self::Host(path.to_owned())
    }
}

impl Image {
    /// An image that contains only `/tmp` and runs as root. `reference` is `name:tag`.
    pub fn new(reference: &str) -> Self {
        let files = BTreeMap::from([("tmp".into(), Entry::Directory { mode: 0o1777 })]);
        let (user, entrypoint, labels) = (String::new(), Vec::new(), BTreeMap::new());
        Self { reference: reference.to_owned(), files, user, entrypoint, labels }
    }

    pub fn file(mut self, path: impl AsRef<Path>, content: impl Into<Content>, mode: u32) -> Self {
        self.add(path.as_ref(), Entry::File { content: content.into(), mode });
        self
    }

    pub fn link(mut self, path: impl AsRef<Path>, target: impl Into<PathBuf>) -> Self {
        self.add(path.as_ref(), Entry::Link(target.into()));
        self
    }

    pub fn user(mut self, id: u32) -> Self {
        self.user = format!("{id}:{id}");
        self
    }

    pub fn entrypoint(mut self, words: &[&str]) -> Self {
        self.entrypoint = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Adds the host's program `binary` as `path`, with its shared libraries and loader.
    pub fn binary_with_libraries(mut self, path: impl AsRef<Path>, binary: &Path) -> Result<Self> {
        for library in libraries(binary)? {
            self = self.file(&library, library.as_path(), 0o755);
        }
        Ok(self.file(path, binary, 0o755))
    }

    /// The host's certificate authorities.
    pub fn certificates(self) -> Result<Self> {
        let host = Path::new(CERTIFICATES);
        ensure!(host.exists(), "{CERTIFICATES} is missing: apt-get install ca-certificates");
        Ok(self.file(CERTIFICATES, host, 0o644))
    }

    /// A shell and the usual small programs.
    pub fn busybox(mut self) -> Result<Self> {
        let busybox = tool("containerd")?.join("bin/busybox");
        for applet in APPLETS {
            self = self.link(Path::new("/bin").join(applet), "busybox");
        }
        Ok(self.file("/bin/busybox", busybox.as_path(), 0o755))
    }

    /// Writes the archive.
    pub fn write(&self, path: &Path) -> Result<()> {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(dir)?;
        let (mut layer, layer_digest, layer_size) = self.write_layer(dir)?;
        let config = self.config(&layer_digest).to_string();
        let config_digest = hex(&Sha256::digest(&config));
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config_digest, config.len() as u64),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer_digest, layer_size)],
        })
        .to_string();
        let manifest_digest = hex(&Sha256::digest(&manifest));
        let mut entry =
            descriptor("application/vnd.oci.image.manifest.v1+json", &manifest_digest, manifest.len() as u64);
        let full = full_reference(&self.reference);
        let tag = full.rsplit(':').next().unwrap_or_default();
        entry["annotations"] = json!({ "io.containerd.image.name": full, "org.opencontainers.image.ref.name": tag });
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [entry],
        });
        let docker = json!([{
            "Config": blob(&config_digest),
            "RepoTags": [self.reference],
            "Layers": [blob(&layer_digest)],
        }]);

        let mut archive = Builder::new(File::create(path).with_context(|| format!("cannot write {}", path.display()))?);
        for dir in ["blobs/", "blobs/sha256/"] {
            archive.append_data(&mut header(EntryType::Directory, 0o755, 0), dir, io::empty())?;
        }
        archive.append_data(&mut header(EntryType::Regular, 0o644, layer_size), blob(&layer_digest), &mut layer)?;
        for (name, text) in [
            (blob(&config_digest), config),
            (blob(&manifest_digest), manifest),
            ("oci-layout".into(), json!({ "imageLayoutVersion": "1.0.0" }).to_string()),
            ("index.json".into(), index.to_string()),
            ("manifest.json".into(), docker.to_string()),
        ] {
            archive.append_data(&mut header(EntryType::Regular, 0o644, text.len() as u64), name, text.as_bytes())?;
        }
        Ok(archive.into_inner()?.flush()?)
    }

    fn add(&mut self, path: &Path, entry: Entry) {
        let path = path.strip_prefix("/").unwrap_or(path);
        for dir in path.ancestors().skip(1).filter(|dir| !dir.as_os_str().is_empty()) {
            self.files.entry(dir.to_owned()).or_insert(Entry::Directory { mode: 0o755 });
        }
        self.files.insert(path.to_owned(), entry);
    }

    /// The layer as an unnamed file in `dir`, its digest and its size.
    fn write_layer(&self, dir: &Path) -> Result<(File, String, u64)> {
        let mut layer = Builder::new(tempfile::tempfile_in(dir)?);
        for (path, entry) in &self.files {
            match entry {
                Entry::Directory { mode } => {
                    layer.append_data(&mut header(EntryType::Directory, *mode, 0), path.join(""), io::empty())?;
                }
                Entry::Link(target) => layer.append_link(&mut header(EntryType::Symlink, 0o777, 0), path, target)?,
                Entry::File { content: Content::Bytes(bytes), mode } => {
                    let mut header = header(EntryType::Regular, *mode, bytes.len() as u64);
                    layer.append_data(&mut header, path, bytes.as_slice())?;
                }
                Entry::File { content: Content::Host(host), mode } => {
                    let file = File::open(host).with_context(|| format!("cannot read {}", host.display()))?;
                    let mut header = header(EntryType::Regular, *mode, file.metadata()?.len());
                    layer.append_data(&mut header, path, file)?;
                }
            }
        }
        let mut file = layer.into_inner()?;
        file.rewind()?;
        let (digest, size) = digest(&mut file)?;
        file.rewind()?;
        Ok((file, digest, size))
    }

    fn config(&self, layer_digest: &str) -> Value {
        json!({
            "created": "1970-01-01T00:00:00Z",
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "User": self.user,
                "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
                "Entrypoint": self.entrypoint,
                "WorkingDir": "/",
                "Labels": self.labels,
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer_digest}")] },
        })
    }
}

/// The image of the operator: `binary` is `paddock`.
pub fn operator_image(reference: &str, binary: &Path) -> Result<Image> {
    Ok(Image::new(reference)
        .binary_with_libraries("/usr/local/bin/paddock", binary)?
        .certificates()?
        .user(USER)
        .entrypoint(&["/usr/local/bin/paddock"])
        .label("org.opencontainers.image.title", "paddock"))
}

/// The image of a board's runner: `binary`, run with `args`, is the stand-in for GitHub's runner.
pub fn runner_image(reference: &str, binary: &Path, args: &[&str]) -> Result<Image> {
    let program = "/usr/local/bin/runner";
    Ok(Image::new(reference)
        .busybox()?
        .binary_with_libraries(program, binary)?
        .certificates()?
        .entrypoint(&[&[program], args].concat()))
}

/// The sandbox image, which keeps a pod's namespaces open.
pub fn sandbox_image(reference: &str) -> Result<Image> {
    Ok(Image::new(reference).busybox()?.entrypoint(&["/bin/busybox", "sleep", "2147483647"]))
}

/// Expands a short image reference like Kubernetes.
pub fn full_reference(reference: &str) -> String {
    let tagged = match reference.rsplit('/').next().is_some_and(|last| last.contains(':')) {
        true => reference.to_owned(),
        false => format!("{reference}:latest"),
    };
    match tagged.split_once('/') {
        None => format!("docker.io/library/{tagged}"),
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => tagged,
        Some(_) => format!("docker.io/{tagged}"),
    }
}

/// The shared libraries and loader of a program, as found by its own loader; empty for a static one.
fn libraries(binary: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(binary).env("LC_ALL", "C").output().context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if stderr.contains("not a dynamic executable") || text.contains("statically linked") {
        return Ok(Vec::new());
    }
    ensure!(output.status.success(), "ldd {}: {}", binary.display(), stderr.trim());
    if let Some(line) = text.lines().find(|line| line.contains("not found")) {
        bail!("{} needs a library that is not installed: {}", binary.display(), line.trim());
    }
    Ok(library_paths(&text))
}

fn library_paths(ldd: &str) -> Vec<PathBuf> {
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    ldd.lines().filter_map(path).collect()
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

fn descriptor(media_type: &str, digest: &str, size: u64) -> Value {
    json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size })
}

fn blob(digest: &str) -> String {
    format!("blobs/sha256/{digest}")
}

fn digest(file: &mut File) -> io::Result<(String, u64)> {
    let (mut hasher, mut size, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok((hex(&hasher.finalize()), size));
        }
        hasher.update(&buffer[..read]);
        size += read as u64;
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// This machine's architecture by its Go name, which images use.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(image: &Image) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.tar");
        image.write(&path).unwrap();
        fs::read(path).unwrap()
    }

    fn image() -> Image {
        Image::new("bed/test:1").file("/etc/greeting", "hello", 0o644).link("/bin/sh", "busybox").user(USER)
    }

    #[test]
    fn the_same_contents_give_the_same_bytes() {
        assert_eq!(written(&image()), written(&image()));
        assert_ne!(written(&image()), written(&image().label("a", "b")));
    }

    #[test]
    fn every_blob_is_named_by_what_it_holds() {
        let bytes = written(&image());
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut blobs = 0;
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().to_path_buf();
            if let (Ok(name), true) = (path.strip_prefix("blobs/sha256"), entry.header().entry_type().is_file()) {
                let mut content = Vec::new();
                entry.read_to_end(&mut content).unwrap();
                assert_eq!(hex(&Sha256::digest(&content)), name.to_str().unwrap());
                blobs += 1;
            }
        }
        assert_eq!(blobs, 3, "the layer, the config and the manifest");
    }

    #[test]
    fn a_dynamic_program_brings_its_libraries_and_loader() {
        let ldd = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(library_paths(ldd), found);
        assert!(!libraries(&std::env::current_exe().unwrap()).unwrap().is_empty());
    }

    #[test]
    fn short_references_are_completed_as_kubernetes_does() {
        for (short, full) in [
            ("paddock", "docker.io/library/paddock:latest"),
            ("bed/pause:1", "docker.io/bed/pause:1"),
            ("localhost/x:1", "localhost/x:1"),
            ("registry.example:5000/x", "registry.example:5000/x:latest"),
        ] {
            assert_eq!(full_reference(short), full);
        }
    }
}
