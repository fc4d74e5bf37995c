//! The chart's permissions without its workload: the bed runs the operator itself.

use std::path::PathBuf;

use anyhow::Result;

use super::{ControlPlane, RELEASE, RELEASE_NAMESPACE, WAIT, client_from, succeeded};

impl ControlPlane {
    /// Applies the chart's CRDs, service account and roles without its deployment; `settings` are additional `--set`
    /// values. Returns the kubeconfig for the chart's operator.
    pub async fn install_chart_rbac(&self, settings: &[&str]) -> Result<PathBuf> {
        let chart = concat!(env!("PADDOCK_SOURCE"), "/charts/paddock");
        let mut args = vec!["template", RELEASE, chart, "--namespace", RELEASE_NAMESPACE, "--set", "clusterName=bed"];
        args.extend(settings.iter().flat_map(|setting| ["--set", setting]));
        let rendered = succeeded("helm template", self.helm(&args).await?)?;
        self.apply(&format!("apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {RELEASE_NAMESPACE}\n")).await?;
        self.apply(&without_workload(&rendered)).await?;
        let wait = ["wait", "--for=condition=Established", "--timeout=120s", "crd", "--all"];
        succeeded("kubectl wait", self.kubectl(&wait).await?)?;
        let kubeconfig = self.kubeconfig_for_service_account(RELEASE_NAMESPACE, RELEASE).await?;
        // An established CRD is served a moment later, and RBAC rules take effect with a delay.
        let operator = client_from(&kubeconfig).await?;
        for plural in ["runnerpools", "runnerclaims", "workers"] {
            let list = format!("/apis/paddock.dev/v1alpha1/{plural}?limit=1");
            let listed = async || {
                let request = axum::http::Request::get(&list).body(Vec::new()).expect("a constant request");
                operator.request_text(request).await?;
                Ok(true)
            };
            WAIT.until_true(&format!("the operator may list {plural}"), listed).await?;
        }
        Ok(kubeconfig)
    }
}

/// The documents of a rendered chart with the operator's permissions, without its workload.
fn without_workload(rendered: &str) -> String {
    const KINDS: [&str; 8] = [
        "CustomResourceDefinition",
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
        "Role",
        "RoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ];
    let kind = |document: &str| document.lines().find_map(|line| line.strip_prefix("kind: ").map(str::to_owned));
    let kept = rendered.split("\n---\n").filter(|text| kind(text).is_some_and(|kind| KINDS.contains(&kind.as_str())));
    kept.collect::<Vec<_>>().join("\n---\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_rights_are_kept_and_its_workload_is_not() {
        let rendered =
            "---\n# Source: a\nkind: ServiceAccount\n---\nkind: Deployment\nspec:\n  kind: Role\n---\nkind: Role\n";
        assert_eq!(without_workload(rendered), "---\n# Source: a\nkind: ServiceAccount\n---\nkind: Role\n");
    }
}
