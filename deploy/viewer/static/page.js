// The data that the server sent with a run's page, and the run's address.
export let data = JSON.parse(document.querySelector("#data").textContent);
export const run = `${document.documentElement.dataset.root}/run/${encodeURIComponent(data.run)}`;

/** Reloads the page's data from its JSON at `path` below the run; false if the server does not give it. */
export async function renew(path) {
  const answer = await fetch(`${run}/${path}`);
  if (answer.ok) data = await answer.json();
  return answer.ok;
}
