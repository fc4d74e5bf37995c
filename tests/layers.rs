//! The layers, enforced by reading the sources. Imports point one way: `api`, `plan`, `effects`, `controllers`, `web`;
//! and what decides has neither a clock nor a way to the outside. Code that is only compiled for tests may do as it likes.

#[path = "layers/source.rs"]
mod source;

use std::{
    collections::BTreeSet,
    fmt, fs,
    path::{Path, PathBuf},
};

use source::{paths, strip};

/// What the sources below a path may name.
struct Layer {
    /// A directory or a file of the repository.
    path: &'static str,
    /// Modules of the same crate.
    modules: &'static [&'static str],
    outside: Outside,
    rule: &'static str,
}

enum Outside {
    /// Decisions: these crates, or parts of crates, and of std what is neither I/O nor a clock.
    Pure(&'static [&'static str]),
    /// Everything but [`CLOUDS`].
    NoClouds,
    Any,
}

/// Only `src/effects` speaks to AWS and GitHub.
const CLOUDS: &[&str] = &["aws_config", "aws_sdk_dynamodb", "aws_sdk_ec2", "aws_sdk_sqs", "octocrab", "reqwest"];

/// The parts of std that are I/O or a clock.
const IMPURE: &[&str] = &[
    "std::env",
    "std::fs",
    "std::net",
    "std::os",
    "std::process",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
];

const LAYERS: &[Layer] = &[
    Layer {
        path: "src/api",
        modules: &["api"],
        outside: Outside::Pure(&[
            "jiff",
            "k8s_openapi",
            "kube::CustomResource",
            "kube::CustomResourceExt",
            "kube::KubeSchema",
            "schemars",
            "serde",
            "serde_json",
            "serde_saphyr",
        ]),
        rule: "the API imports nothing of ours, and describes without doing",
    },
    Layer {
        path: "src/plan",
        modules: &["api", "plan"],
        outside: Outside::Pure(&[
            "base64",
            "flate2",
            "hmac",
            "jiff",
            "k8s_openapi",
            "paddock_record",
            "serde",
            "serde_json",
            "sha2",
            "thiserror",
        ]),
        rule: "decisions use the API's types alone: no client, no runtime, no I/O, and time is passed in",
    },
    Layer {
        path: "src/effects",
        modules: &["api", "plan", "effects"],
        outside: Outside::Any,
        rule: "adapters know nothing of who uses them",
    },
    Layer {
        path: "src/controllers",
        modules: &["api", "plan", "effects", "controllers", "metrics", "settings", "stores"],
        outside: Outside::NoClouds,
        rule: "controllers reach AWS and GitHub through src/effects, and know nothing of pages",
    },
    Layer {
        path: "src/web/webhook.rs",
        modules: &["plan", "web", "metrics", "controllers"],
        outside: Outside::NoClouds,
        rule: "webhooks are handed to the intake, and nobody else is reached",
    },
    Layer {
        path: "src/web",
        modules: &["api", "plan", "web", "metrics", "settings", "stores"],
        outside: Outside::NoClouds,
        rule: "pages show what the stores have, and reach nobody else",
    },
    Layer {
        path: "src/leader.rs",
        modules: &["effects", "leader"],
        outside: Outside::NoClouds,
        rule: "the election knows the fence alone",
    },
    Layer {
        path: "src/stores",
        modules: &["api", "stores"],
        outside: Outside::NoClouds,
        rule: "stores know the API alone",
    },
    Layer {
        path: "src/metrics.rs",
        modules: &["metrics"],
        outside: Outside::NoClouds,
        rule: "metrics are filled by others",
    },
    Layer {
        path: "src/settings.rs",
        modules: &["api", "settings"],
        outside: Outside::NoClouds,
        rule: "settings know the API alone",
    },
    Layer {
        path: "src/telemetry.rs",
        modules: &["settings", "telemetry"],
        outside: Outside::NoClouds,
        rule: "logs know the settings alone",
    },
    Layer {
        path: "agent/src/step.rs",
        modules: &["limits", "step"],
        outside: Outside::Pure(&["jiff", "paddock_record"]),
        rule: "the agent's decisions have no I/O, and time is passed in",
    },
    Layer {
        path: "device-plugin/src/board.rs",
        modules: &["board"],
        outside: Outside::Pure(&[]),
        rule: "what a device tree says is read elsewhere",
    },
];

/// What puts the layers together, and so knows them all.
const ASSEMBLY: &[&str] = &["src/lib.rs", "src/main.rs", "src/run.rs"];

#[derive(Debug, PartialEq)]
struct Violation {
    file: String,
    line: usize,
    found: String,
    rule: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: `{}` does not belong here: {}", self.file, self.line, self.found, self.rule)
    }
}

#[test]
fn imports_point_one_way_and_decisions_are_pure() {
    let root = Path::new(env!("PADDOCK_SOURCE"));
    let dependencies = dependencies(&fs::read_to_string(root.join("Cargo.toml")).unwrap());
    let files: Vec<_> =
        ["src", "agent/src", "device-plugin/src"].iter().flat_map(|dir| sources(&root.join(dir))).collect();
    let text = |file: &Path| fs::read_to_string(file).unwrap();
    let for_tests: BTreeSet<_> = files.iter().flat_map(|file| strip(&text(file)).test_files(file)).collect();
    let (mut violations, mut seen) = (Vec::new(), BTreeSet::new());
    for file in files.iter().filter(|file| !for_tests.contains(*file)) {
        let name = file.strip_prefix(root).unwrap().to_str().unwrap();
        match LAYERS.iter().find(|layer| Path::new(name).starts_with(layer.path)) {
            Some(layer) => {
                seen.insert(layer.path);
                violations.extend(check(layer, name, &text(file), &dependencies));
            }
            None if !name.starts_with("src/") || ASSEMBLY.contains(&name) => {}
            None => panic!("{name} is in no layer: say in tests/layers.rs what it may import"),
        }
    }
    let missing: Vec<_> = LAYERS.iter().map(|layer| layer.path).filter(|path| !seen.contains(path)).collect();
    assert!(missing.is_empty(), "layers without a source, so nothing was checked: {missing:?}");
    let violations: Vec<_> = violations.iter().map(ToString::to_string).collect();
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

fn check(layer: &Layer, file: &str, text: &str, dependencies: &BTreeSet<String>) -> Vec<Violation> {
    let stripped = strip(text);
    let mut violations: Vec<Violation> = Vec::new();
    for (offset, path) in paths(&stripped.code) {
        let line = stripped.code[..offset].iter().filter(|byte| **byte == b'\n').count() + 1;
        let allowed = match resolve(file, &path) {
            Place::Ours(module) => layer.modules.contains(&module.as_str()),
            Place::Outside => layer.outside.allows(&path, dependencies),
        };
        let found = path.join("::");
        if !allowed && !violations.iter().any(|known| known.line == line && known.found == found) {
            violations.push(Violation { file: file.to_owned(), line, found, rule: layer.rule });
        }
    }
    violations
}

impl Outside {
    fn allows(&self, path: &[String], dependencies: &BTreeSet<String>) -> bool {
        let below = |prefix: &str| {
            path.iter().map(String::as_str).zip(prefix.split("::")).all(|(a, b)| a == b)
                && path.len() >= prefix.split("::").count()
        };
        match self {
            Self::Any => true,
            Self::NoClouds => !CLOUDS.iter().any(|cloud| below(cloud)),
            Self::Pure(parts) => {
                let reads_a_clock = path.last().is_some_and(|last| last == "now");
                let foreign = dependencies.contains(&path[0]) && !parts.iter().any(|part| below(part));
                !reads_a_clock && !foreign && !IMPURE.iter().any(|impure| below(impure))
            }
        }
    }
}

enum Place {
    /// The first module of a path in the file's own crate.
    Ours(String),
    /// Another crate, or a name that is in scope.
    Outside,
}

/// Follows `crate`, `self` and `super` from the file that names the path.
fn resolve(file: &str, path: &[String]) -> Place {
    let below = file.split_once("src/").map_or(file, |(_, below)| below).trim_end_matches(".rs");
    let mut module: Vec<&str> = below.split('/').filter(|part| !["mod", "lib", "main"].contains(part)).collect();
    let mut rest = path.iter().map(String::as_str).peekable();
    match rest.peek() {
        Some(&"crate") => {
            rest.next();
            module.clear();
        }
        Some(&"self") => drop(rest.next()),
        Some(&"super") => {
            while rest.next_if_eq(&"super").is_some() {
                module.pop();
            }
        }
        _ => return Place::Outside,
    }
    module.extend(rest);
    Place::Ours(module.first().map_or_else(String::new, |first| (*first).to_owned()))
}

/// The crates that the workspace's manifest names, as code spells them.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let table = manifest.split("[workspace.dependencies]").nth(1).expect("the manifest lists the dependencies");
    let lines = table.lines().take_while(|line| !line.starts_with('['));
    lines.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.replace('-', "_")).collect()
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod the_checker {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<String> {
        let manifest = fs::read_to_string(concat!(env!("PADDOCK_SOURCE"), "/Cargo.toml")).unwrap();
        let layer = LAYERS.iter().find(|layer| Path::new(file).starts_with(layer.path)).unwrap();
        let violations = check(layer, file, text, &dependencies(&manifest));
        violations.into_iter().map(|violation| format!("{} {}", violation.line, violation.found)).collect()
    }

    #[test]
    fn finds_what_does_not_belong() {
        for (file, text, expected) in [
            ("src/api/claim.rs", "use crate::plan::claim;", "1 crate::plan::claim"),
            ("src/api/claim.rs", "\nuse kube::Client;", "2 kube::Client"),
            ("src/plan/claim.rs", "use crate::{api::{Pool, claim::*}, effects::aws};", "1 crate::effects::aws"),
            ("src/plan/claim.rs", "use super::super::effects as e;", "1 super::super::effects"),
            ("src/plan/mod.rs", "fn f() -> super::effects::Aws {}", "1 super::effects::Aws"),
            ("src/plan/claim.rs", "use kube::{\n    Api,\n};", "2 kube::Api"),
            ("src/plan/claim.rs", "fn f() { tokio::spawn(g()); }", "1 tokio::spawn"),
            ("src/plan/claim.rs", "let t = jiff::Timestamp::now();", "1 jiff::Timestamp::now"),
            ("src/plan/claim.rs", "let t = T ::now();", "1 T::now"),
            ("src/plan/claim.rs", "use std::{time::{Duration, Instant}};", "1 std::time::Instant"),
            ("src/plan/claim.rs", "let home = std::env::var(\"HOME\");", "1 std::env::var"),
            ("src/plan/claim.rs", "const C: char = '\"'; use std::fs; // \"", "1 std::fs"),
            (
                "src/plan/claim.rs",
                "#[cfg(test)]\nmod tests { fn g() {} }\nuse std::process::Command;",
                "3 std::process::Command",
            ),
            ("src/effects/aws.rs", "use crate::controllers::Context;", "1 crate::controllers::Context"),
            ("src/effects/github/mod.rs", "use super::super::web;", "1 super::super::web"),
            ("src/controllers/pool.rs", "use crate::web::router;", "1 crate::web::router"),
            ("src/controllers/pool.rs", "let c: aws_sdk_ec2::Client;", "1 aws_sdk_ec2::Client"),
            ("src/web/mod.rs", "use crate::controllers::Context;", "1 crate::controllers::Context"),
            ("agent/src/step.rs", "use crate::store::Store;", "1 crate::store::Store"),
        ] {
            assert_eq!(found(file, text), [expected], "{file}: {text}");
        }
    }

    #[test]
    fn lets_pass_what_belongs() {
        for (file, text) in [
            ("src/api/pool.rs", "use super::{board::BoardPool, common::x}; use kube::{CustomResource, KubeSchema};"),
            ("src/plan/claim.rs", "use crate::api::Pool; use super::{pickup::Needs, entity::{self, Scope}};"),
            ("src/plan/claim.rs", "use std::{io::Write, sync::Arc, time::Duration}; fn f<'a>(x: &'a str) {}"),
            (
                "src/plan/claim.rs",
                "// use crate::effects;\n/* std::fs */ const S: &str = \"std::env\"; const R: &str = r#\"tokio::spawn\"#;",
            ),
            ("src/plan/claim.rs", "#[cfg(test)]\nmod tests {\n    use std::{fs, process::Command};\n}\n"),
            (
                "src/plan/claim.rs",
                "#[cfg(test)]\nuse std::{fs};\n#[cfg(test)]\n#[path = \"claim_tests.rs\"]\nmod tests;",
            ),
            ("src/effects/aws.rs", "use crate::plan::fleet; use super::fence::Fence; let now = Timestamp::now();"),
            ("src/controllers/board/claim.rs", "use super::{super::{drive, reference}, Board}; use kube::Api;"),
        ] {
            assert_eq!(found(file, text), [""; 0], "{file}: {text}");
        }
    }

    #[test]
    fn says_where_and_why() {
        let layer = LAYERS.iter().find(|layer| layer.path == "src/effects").unwrap();
        let violations = check(layer, "src/effects/aws.rs", "\n\nuse crate::web;", &BTreeSet::new());
        assert_eq!(
            violations[0].to_string(),
            "src/effects/aws.rs:3: `crate::web` does not belong here: adapters know nothing of who uses them"
        );
    }
}
