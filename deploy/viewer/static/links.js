/** Addresses of the viewer's pages around one step. A group that is not there has none. */
export function linksOf(data) {
  const step = `${document.documentElement.dataset.root}/run/${encodeURIComponent(data.run)}/step/${data.step}`;
  const group = (ticket) => (ticket === null ? null : `${step}/group/${ticket}`);
  return { step: () => step, group, trajectory: (ticket, sample) => `${group(ticket)}/${sample}` };
}
